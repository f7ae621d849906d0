//! One leader per term: by what masters tell of themselves and of each other, and by what they log when elected.
//!
//! Not judged: the term header of answers. It is written after the answer was made, by a master that may have lost the
//! leadership meanwhile.

use super::{Evidence, Findings};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a master logs when it is elected (`master/src/consensus/leadership.rs`).
const ELECTED: &str = "this master was elected leader";

/// A master logged that it was elected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Elected {
    /// Its Raft id.
    pub id: u64,
    /// The term.
    pub term: u64,
}

impl Elected {
    /// Every election in the log of master `id`. An election whose term cannot be read is an error: the log's form
    /// has changed.
    pub fn in_log(id: u64, log: &str) -> Result<Vec<Self>, String> {
        log.lines()
            .filter(|line| line.contains(ELECTED))
            .map(|line| {
                let plain = without_colours(line);
                let digits = plain
                    .split_once("term=")
                    .map(|(_, rest)| rest.chars().take_while(char::is_ascii_digit).collect::<String>());
                let term = digits.and_then(|d| d.parse().ok());
                term.map(|term| Self { id, term })
                    .ok_or_else(|| format!("no term in the log line of an election: {plain}"))
            })
            .collect()
    }
}

/// Drops ANSI escape sequences.
fn without_colours(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        if c == '\u{1b}' {
            chars.by_ref().find(char::is_ascii_alphabetic);
        } else {
            out.push(c);
        }
    }
    out
}

pub(super) fn check(evidence: &Evidence, findings: &mut Findings) {
    let mut terms: BTreeMap<u64, (u64, String)> = BTreeMap::new();
    let told = evidence.masters.iter().filter_map(|seen| {
        let by = format!("master {} at {} µs", seen.id, seen.at_us);
        Some((seen.term, seen.leader?, by))
    });
    let logged = evidence
        .elected
        .iter()
        .map(|e| (e.term, e.id, format!("the log of master {}", e.id)));
    for (term, leader, by) in told.chain(logged) {
        let (first, said) = terms.entry(term).or_insert_with(|| (leader, by.clone()));
        if *first != leader {
            findings.add(format!(
                "term {term} is led by master {first} ({said}) and by master {leader} ({by})"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::testing::*;

    const NAME: &str = "leaders";

    #[test]
    fn a_new_leader_has_a_new_term() {
        let mut run = Run::new();
        run.master(1, 3, Some(1), 10, None);
        run.master(2, 3, Some(1), 10, None);
        run.master(2, 4, None, 10, None);
        run.master(2, 5, Some(2), 11, None);
        run.evidence.elected = vec![Elected { id: 1, term: 3 }, Elected { id: 2, term: 5 }];
        assert_eq!(run.broken(NAME), 0);
    }

    #[test]
    fn two_leaders_of_one_term_are_noticed() {
        let mut run = Run::new();
        run.master(1, 3, Some(1), 10, None);
        run.master(2, 3, Some(2), 10, None);
        assert_eq!(run.broken(NAME), 1);
        run.evidence.elected = vec![Elected { id: 3, term: 3 }];
        assert_eq!(run.broken(NAME), 2);
    }

    #[test]
    fn elections_are_read_from_logs() {
        let log = "2026 INFO \u{1b}[2mraft\u{1b}[0m: this master was elected leader \u{1b}[3mterm\u{1b}[0m\u{1b}[2m=\u{1b}[0m12\nother\n";
        assert_eq!(Elected::in_log(2, log).unwrap(), [Elected { id: 2, term: 12 }]);
        assert!(Elected::in_log(2, "this master was elected leader").is_err());
    }
}
