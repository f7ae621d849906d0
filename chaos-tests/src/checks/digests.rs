//! All masters have the same log and the same state: equal digests at equal index, equal to the replay's, and equal
//! entries wherever two logs overlap below the committed end.

use super::{Evidence, Findings};
use std::collections::BTreeMap;

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    let mut digests: BTreeMap<u64, (u64, &str)> = BTreeMap::new();
    for seen in &evidence.masters {
        let Some(digest) = &seen.digest else { continue };
        let (first, was) = *digests.entry(seen.applied_index).or_insert((seen.id, digest));
        if was != digest {
            findings.add(format!(
                "at index {} master {first} has the digest {was} and master {} has {digest}",
                seen.applied_index, seen.id
            ));
        }
    }
    let Some(replay) = &evidence.replay else { return };
    // What was before the log that could be read is compared among masters only.
    for (index, (id, digest)) in digests.split_off(&replay.first_index) {
        match replay.digests.get(&index) {
            Some(replayed) if replayed != digest => findings.add(format!(
                "at index {index} master {id} has the digest {digest}, the committed log gives {replayed}"
            )),
            Some(_) => {}
            None => findings.add(format!(
                "master {id} has applied index {index}, which is not in the committed log"
            )),
        }
    }
    for conflict in &replay.log_conflicts {
        findings.add(conflict);
    }
}

#[cfg(test)]
mod tests {
    use crate::checks::testing::*;

    const NAME: &str = "digests";

    #[test]
    fn equal_digests_are_fine() {
        let mut run = Run::new();
        let mut log = Log::new(2);
        log.create("a", 0, &[0, 1]);
        let digest = log.state.digest().to_string();
        let index = log.index();
        run.master(1, 1, None, index, Some(&digest));
        run.master(2, 1, None, index, Some(&digest));
        run.master(3, 1, None, index - 1, None);
        run.replay(log);
        assert_eq!(run.broken(NAME), 0);
    }

    #[test]
    fn a_master_that_differs_is_noticed() {
        let mut run = Run::new();
        run.master(1, 1, None, 7, Some("aa"));
        run.master(2, 1, None, 7, Some("bb"));
        assert_eq!(run.broken(NAME), 1);
    }

    #[test]
    fn a_state_that_the_log_does_not_give_is_noticed() {
        let mut run = Run::new();
        let log = Log::new(2);
        run.master(1, 1, None, log.index(), Some("aa"));
        run.master(1, 1, None, log.index() + 1, Some("aa"));
        run.replay(log);
        assert_eq!(run.broken(NAME), 2);
    }
}
