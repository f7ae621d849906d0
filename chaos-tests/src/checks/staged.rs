//! `staged` means whole: every folder that an answer called staged was hashed again at once, and agreed; and again after
//! every further attempt that staged it.
//!
//! Folders that a nemesis damages later are not concerned: each is judged by the first look, right after the answer.

use super::{Evidence, Findings};
use mooncake_proto::api::PlacementState;
use std::collections::{BTreeMap, BTreeSet};

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    let mut looked: BTreeMap<(&str, &str, u64), &crate::history::FolderSeen> = BTreeMap::new();
    for folder in &evidence.folders {
        let first = looked
            .entry((folder.node.as_str(), folder.path.as_str(), folder.attempt))
            .or_insert(folder);
        if folder.at_us < first.at_us {
            *first = folder;
        }
    }
    for folder in looked.values() {
        if let Some(fault) = &folder.fault {
            findings.add(format!(
                "{} on {}, staged by attempt {}, looked at at {} µs: {fault}",
                folder.path, folder.node, folder.attempt, folder.at_us
            ));
        }
    }
    let mut missing = BTreeSet::new();
    for seen in evidence.ops.iter().filter_map(|op| op.seen()) {
        for p in &seen.placements {
            if p.state != PlacementState::Staged {
                continue;
            }
            match &p.local_path {
                None => findings.add(format!("job {}: {} is staged without a folder", seen.job, p.node)),
                Some(path) if !looked.contains_key(&(p.node.as_str(), path.as_str(), p.attempt)) => {
                    missing.insert((&p.node, path, p.attempt));
                }
                Some(_) => {}
            }
        }
    }
    for (node, path, attempt) in missing {
        findings.add(format!(
            "{path} on {node} is staged by attempt {attempt} and was never looked at"
        ));
    }
}

#[cfg(test)]
mod tests {
    use crate::checks::testing::*;
    use crate::history::{FolderSeen, JobSeen};
    use mooncake_proto::api::{JobStatus, PlacementState};

    const NAME: &str = "staged";

    fn run(folders: &[(u64, Option<&str>)]) -> u64 {
        let folders: Vec<_> = folders.iter().map(|(at, fault)| (*at, 1, *fault)).collect();
        run_of(&[1], &folders)
    }

    /// Answers that call it staged by these attempts, and looks: (when, the attempt, what is wrong).
    fn run_of(attempts: &[u64], folders: &[(u64, u64, Option<&str>)]) -> u64 {
        let mut run = Run::new();
        for (at, attempt) in attempts.iter().enumerate() {
            let mut staged = placement("n", PlacementState::Staged, *attempt);
            staged.local_path = Some("/m/a".into());
            let seen = JobSeen {
                placements: vec![staged],
                ..job_seen(&at.to_string(), 5, JobStatus::Completed)
            };
            run.answer_job(&at.to_string(), 0, 1, seen);
        }
        run.evidence.folders = folders
            .iter()
            .map(|(at_us, attempt, fault)| FolderSeen {
                at_us: *at_us,
                attempt: *attempt,
                node: "n".into(),
                path: "/m/a".into(),
                fault: fault.map(str::to_owned),
            })
            .collect();
        run.broken(NAME)
    }

    #[test]
    fn the_first_look_counts() {
        assert_eq!(run(&[(2, None)]), 0);
        assert_eq!(run(&[(9, Some("damaged by a nemesis")), (2, None)]), 0);
        assert_eq!(run(&[(2, Some("block 3 differs"))]), 1);
        assert_eq!(run(&[]), 1, "nobody looked");
    }

    #[test]
    fn each_attempt_that_stages_it_is_looked_at() {
        assert_eq!(run_of(&[1, 2], &[(2, 1, None), (9, 2, None)]), 0);
        assert_eq!(run_of(&[1, 2], &[(2, 1, None)]), 1, "not after the second one");
        assert_eq!(
            run_of(&[1, 2], &[(2, 1, None), (9, 2, Some("block 3 differs"))]),
            1
        );
    }
}
