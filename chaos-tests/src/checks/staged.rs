//! `staged` means whole: every folder that an answer called staged was hashed again at once, and agreed.
//!
//! Folders that a nemesis damages later are not concerned: each is judged by the first look, right after the answer.

use super::{Evidence, Findings};
use mooncake_proto::api::PlacementState;
use std::collections::{BTreeMap, BTreeSet};

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    let mut looked: BTreeMap<(&str, &str), &crate::history::FolderSeen> = BTreeMap::new();
    for folder in &evidence.folders {
        let first = looked
            .entry((folder.node.as_str(), folder.path.as_str()))
            .or_insert(folder);
        if folder.at_us < first.at_us {
            *first = folder;
        }
    }
    for folder in looked.values() {
        if let Some(fault) = &folder.fault {
            findings.add(format!(
                "{} on {}, looked at at {} µs: {fault}",
                folder.path, folder.node, folder.at_us
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
                Some(path) if !looked.contains_key(&(p.node.as_str(), path.as_str())) => {
                    missing.insert((&p.node, path));
                }
                Some(_) => {}
            }
        }
    }
    for (node, path) in missing {
        findings.add(format!("{path} on {node} is staged and was never looked at"));
    }
}

#[cfg(test)]
mod tests {
    use crate::checks::testing::*;
    use crate::history::{FolderSeen, JobSeen};
    use mooncake_proto::api::{JobStatus, PlacementState};

    const NAME: &str = "staged";

    fn run(folders: &[(u64, Option<&str>)]) -> u64 {
        let mut run = Run::new();
        let mut staged = placement("n", PlacementState::Staged, 1);
        staged.local_path = Some("/m/a".into());
        let seen = JobSeen {
            placements: vec![staged],
            ..job_seen("a", 5, JobStatus::Completed)
        };
        run.answer_job("a", 0, 1, seen);
        run.evidence.folders = folders
            .iter()
            .map(|(at_us, fault)| FolderSeen {
                at_us: *at_us,
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
}
