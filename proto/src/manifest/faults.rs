//! What is wrong with a request, in bounded memory.

use serde::{Deserialize, Serialize};

/// Most faults named in one answer; the rest is counted. Keeps the answer to a broken 64 MiB body small.
pub const MAX_FAULTS: usize = 100;

/// One fault of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// RFC 6901 pointer to the member at fault.
    pub pointer: String,
    /// Stable, for programs.
    pub code: String,
    /// For a person: what is wrong and what would be right.
    pub detail: String,
}

/// The faults of one request: the first [`MAX_FAULTS`] in full, the others as their number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    listed: Vec<Fault>,
    count: usize,
}

impl Faults {
    /// Adds one.
    pub fn push(&mut self, pointer: impl Into<String>, code: &str, detail: impl Into<String>) {
        self.count += 1;
        if self.listed.len() < MAX_FAULTS {
            self.listed.push(Fault {
                pointer: pointer.into(),
                code: code.into(),
                detail: detail.into(),
            });
        }
    }

    /// Counts `more` that nobody needs the text of: look at [`Faults::is_full`] before.
    pub fn count_more(&mut self, more: usize) {
        self.count += more;
    }

    /// Whether a further one would only be counted.
    pub fn is_full(&self) -> bool {
        self.listed.len() >= MAX_FAULTS
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Takes in those of `other`, behind these.
    pub fn append(&mut self, other: Self) {
        let room = MAX_FAULTS.saturating_sub(self.listed.len());
        self.listed.extend(other.listed.into_iter().take(room));
        self.count += other.count;
    }

    /// For the answer: those named, and where there are more, a last entry with their number.
    pub fn into_vec(self) -> Vec<Fault> {
        let Self { mut listed, count } = self;
        let more = count - listed.len();
        if more > 0 {
            listed.push(Fault {
                pointer: String::new(),
                code: "too_many_faults".into(),
                detail: format!("{more} more faults are not listed"),
            });
        }
        listed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_listed_is_counted_once() {
        let many = |n: usize| {
            let mut faults = Faults::default();
            (0..n).for_each(|i| faults.push(format!("/{i}"), "x", "y"));
            faults
        };
        assert!(many(0).is_empty() && many(0).into_vec().is_empty());
        assert_eq!(many(MAX_FAULTS).into_vec().len(), MAX_FAULTS);
        let mut all = many(60);
        all.append(many(250));
        all.count_more(5);
        let listed = all.into_vec();
        assert_eq!(listed.len(), MAX_FAULTS + 1);
        assert_eq!(listed[60].pointer, "/0");
        assert_eq!(listed[MAX_FAULTS].detail, "215 more faults are not listed");
    }
}
