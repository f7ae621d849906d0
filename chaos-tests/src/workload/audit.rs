//! Hashes every folder as soon as an answer calls it staged.

use super::library::Library;
use crate::{
    history::{FolderSeen, History, JobSeen, Record},
    model::tree,
};
use anyhow::Result;
use mooncake_proto::api::PlacementState;
use parking_lot::Mutex;
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{sync::Semaphore, task::JoinSet};

/// Folders hashed at once: the processes under test want the CPUs too.
const AT_ONCE: usize = 2;
/// How long a disk may be away: longer than any nemesis takes it.
const UNREADABLE: Duration = Duration::from_secs(60);
const RETRY: Duration = Duration::from_millis(200);

/// Who looks.
pub struct Auditor {
    library: Arc<Library>,
    history: Arc<History>,
    /// (node, folder, attempt that staged it), each looked at once.
    seen: Mutex<BTreeSet<(String, String, u64)>>,
    looks: Mutex<JoinSet<()>>,
    turns: Arc<Semaphore>,
}

impl Auditor {
    /// Looks at models of this library.
    pub fn new(library: Arc<Library>, history: Arc<History>) -> Self {
        Self {
            library,
            history,
            seen: Mutex::default(),
            looks: Mutex::default(),
            turns: Arc::new(Semaphore::new(AT_ONCE)),
        }
    }

    /// Looks, in the background, at what this snapshot calls staged and nobody has looked at.
    pub fn look(&self, seen: &JobSeen) {
        for p in &seen.placements {
            let (PlacementState::Staged, Some(path)) = (p.state, &p.local_path) else {
                continue;
            };
            if self.seen.lock().insert((p.node.clone(), path.clone(), p.attempt)) {
                self.look_at(p.node.clone(), path.clone(), p.attempt);
            }
        }
    }

    fn look_at(&self, node: String, path: String, attempt: u64) {
        let (library, history, turns) = (self.library.clone(), self.history.clone(), self.turns.clone());
        self.looks.lock().spawn(async move {
            let Ok(_turn) = turns.acquire().await else { return };
            let looked = tokio::task::spawn_blocking(move || {
                let until = Instant::now() + UNREADABLE;
                let fault = loop {
                    let before = history.disk_trouble(&node);
                    match fault(&library, Path::new(&path)) {
                        Ok(fault) => break fault,
                        Err(e) => {
                            let now = history.disk_trouble(&node);
                            // What is not there although its disk is, and was all the time, was not staged.
                            let away = now.is_active() || now != before;
                            if !away || Instant::now() >= until {
                                break Some(format!("it cannot be read: {e:#}"));
                            }
                            std::thread::sleep(RETRY);
                        }
                    }
                };
                history.record(Record::Folder(FolderSeen {
                    at_us: history.now_us(),
                    node,
                    path,
                    attempt,
                    fault,
                }));
            });
            // A panic there is a missing record, which the checker reports.
            let _ = looked.await;
        });
    }

    /// Waits until every look is over.
    pub async fn settle(&self) -> Result<()> {
        let mut looks = std::mem::take(&mut *self.looks.lock());
        while let Some(done) = looks.join_next().await {
            done?;
        }
        Ok(())
    }
}

/// What is wrong with a final folder: `<root>/<provider>/<model_id>/<revision>/<format>`.
/// An error says that nothing can be said: a folder that is not there, or a disk.
fn fault(library: &Library, path: &Path) -> Result<Option<String>> {
    let mut names = path.components().rev().skip(2);
    let id: PathBuf = names.next().into_iter().collect();
    let Some(model) = library.model(&id.display().to_string()) else {
        return Ok(Some(format!("it is of no model of this run: {}", id.display())));
    };
    let files = tree(path)?;
    if files == model.files {
        return Ok(None);
    }
    let differing: Vec<_> = model
        .files
        .iter()
        .filter(|(name, file)| files.get(*name) != Some(file))
        .map(|(name, _)| name.as_str())
        .chain(
            files
                .keys()
                .filter(|n| !model.files.contains_key(*n))
                .map(String::as_str),
        )
        .collect();
    Ok(Some(format!("these files differ: {differing:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        checks::testing,
        history::{Concern, FolderSeen, Phase},
    };
    use mooncake_proto::api::JobStatus;

    #[tokio::test]
    async fn a_changed_byte_and_a_file_too_many_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let library = Arc::new(Library::create(dir.path(), "http://s", 3, 1).unwrap());
        // The layout of a final folder.
        let staged = |i: usize| dir.path().join(format!("root/test/m-{i}/r1/bin"));
        for i in 0..3 {
            std::fs::create_dir_all(staged(i).parent().unwrap()).unwrap();
            std::fs::rename(dir.path().join(format!("m-{i}")), staged(i)).unwrap();
        }
        let mut bytes = std::fs::read(staged(1).join("part-0.bin")).unwrap();
        bytes[0] ^= 1;
        std::fs::write(staged(1).join("part-0.bin"), bytes).unwrap();
        std::fs::write(staged(2).join("more"), "x").unwrap();
        let history = Arc::new(History::new(None).unwrap());
        let auditor = Auditor::new(library, history.clone());
        let mut seen = testing::job_seen("a", 1, JobStatus::Completed);
        for i in 0..3 {
            let mut p = testing::placement("n", PlacementState::Staged, 1);
            p.local_path = Some(staged(i).display().to_string());
            seen.placements.push(p);
        }
        auditor.look(&seen);
        auditor.look(&seen);
        auditor.settle().await.unwrap();
        let mut faults: Vec<_> = history
            .records()
            .unwrap()
            .into_iter()
            .filter_map(|r| match r {
                Record::Folder(FolderSeen { path, fault, .. }) => Some((path, fault)),
                _ => None,
            })
            .collect();
        faults.sort();
        let faults: Vec<_> = faults.into_iter().map(|(_, f)| f.unwrap_or_default()).collect();
        assert_eq!(faults.len(), 3, "each is looked at once");
        assert_eq!(faults[0], "");
        assert!(
            faults[1].contains("part-0.bin") && faults[2].contains("more"),
            "{faults:?}"
        );
    }

    fn staged(path: &Path, attempt: u64) -> JobSeen {
        let mut seen = testing::job_seen("a", 1, JobStatus::Completed);
        let mut p = testing::placement("n", PlacementState::Staged, attempt);
        p.local_path = Some(path.display().to_string());
        seen.placements.push(p);
        seen
    }

    fn faults(history: &History) -> Vec<Option<String>> {
        let fault = |record| match record {
            Record::Folder(seen) => Some(seen.fault),
            _ => None,
        };
        let records = history.records().unwrap();
        records.into_iter().filter_map(fault).collect()
    }

    #[tokio::test]
    async fn what_is_not_there_is_a_fault_at_once_and_waited_for_only_while_its_disk_is_away() {
        let dir = tempfile::tempdir().unwrap();
        let library = Arc::new(Library::create(dir.path(), "http://s", 1, 1).unwrap());
        let folder = dir.path().join("root/test/m-0/r1/bin");
        let history = Arc::new(History::new(None).unwrap());
        let auditor = Auditor::new(library, history.clone());
        // Another node's disk is away.
        let disk = |node: &str| vec![Concern::Disk(node.into())];
        history.event("power-loss-client", Phase::Injected, disk("m"), "");
        auditor.look(&staged(&folder, 1));
        auditor.settle().await.unwrap();
        let found = faults(&history);
        assert!(
            found[0].as_ref().is_some_and(|f| f.contains("cannot be read")),
            "{found:?}"
        );

        history.event("power-loss-client", Phase::Injected, disk("n"), "");
        auditor.look(&staged(&folder, 2));
        std::fs::create_dir_all(folder.parent().unwrap()).unwrap();
        std::fs::rename(dir.path().join("m-0"), &folder).unwrap();
        history.event("power-loss-client", Phase::Healed, disk("n"), "");
        auditor.settle().await.unwrap();
        let found = faults(&history);
        assert_eq!(found.len(), 2, "a further attempt is a further look");
        assert_eq!(found[1], None);
    }
}
