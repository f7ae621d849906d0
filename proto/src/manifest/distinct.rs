//! Whether the object ids of different files are distinct, in memory and time that follow the size of the
//! request, not the number of ids it asks for: patterns are compared in arithmetic and never counted out.
//!
//! It rests on what [`ObjectIds`] makes of ids: a pattern's number is the last group of digits of the id, all of
//! it. So an id has one shape (what stands before that group, behind it, and the group's length), and two ids are
//! the same if and only if shape and number are.

use super::ObjectIds;
use std::collections::{HashMap, hash_map::Entry};

/// Ids of one file that another file has too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Clash {
    /// The later one of the two files.
    pub file: usize,
    /// The first of its chunks whose id the other has.
    pub chunk: u64,
    /// The other file.
    pub owner: usize,
    /// How many of its ids the other has, from this one on.
    pub count: u64,
}

/// Before the number, behind it, and how many digits it has.
type Shape<'a> = (&'a str, &'a str, usize);

/// Numbers of one shape, both ends included.
#[derive(Clone, Copy)]
struct Run {
    first: u64,
    last: u64,
    file: usize,
    /// The number of this file's chunk 0.
    origin: u64,
}

/// All clashes of ids between files, by file. One whose ids meet several other files' is named for one of them at
/// least; ids that occur twice within one file are no business of this.
pub(super) fn clashes(files: &[&ObjectIds]) -> Vec<Clash> {
    let mut shapes: HashMap<Shape<'_>, Vec<Run>> = HashMap::new();
    for (file, ids) in files.iter().enumerate() {
        if let ObjectIds::Pattern {
            head,
            first,
            width,
            tail,
            count,
        } = ids
            && let Some(above) = count.checked_sub(1)
        {
            debug_assert!(
                !head.ends_with(|c: char| c.is_ascii_digit()) && !tail.contains(|c: char| c.is_ascii_digit())
            );
            for (digits, from, to) in by_length(*first, first.saturating_add(above), usize::from(*width)) {
                shapes.entry((head, tail, digits)).or_default().push(Run {
                    first: from,
                    last: to,
                    file,
                    origin: *first,
                });
            }
        }
    }
    let mut out = Vec::new();
    for runs in shapes.values_mut() {
        among(runs, &mut out);
    }

    // Listed ids against each other and against the patterns.
    let mut owners: HashMap<&str, usize> = HashMap::new();
    for (file, ids) in files.iter().enumerate() {
        let ObjectIds::List(list) = ids else { continue };
        for (chunk, id) in (0..).zip(list) {
            match owners.entry(id) {
                Entry::Occupied(owner) if *owner.get() != file => out.push(Clash {
                    file,
                    chunk,
                    owner: *owner.get(),
                    count: 1,
                }),
                Entry::Occupied(_) => {}
                Entry::Vacant(place) => {
                    place.insert(file);
                }
            }
            let run =
                shape_of(id).and_then(|(shape, number)| Some((holder(shapes.get(&shape)?, number)?, number)));
            out.extend(run.map(|(run, number)| {
                let (file, chunk, owner) = match run.file < file {
                    true => (file, chunk, run.file),
                    false => (run.file, number - run.origin, file),
                };
                Clash {
                    file,
                    chunk,
                    owner,
                    count: 1,
                }
            }));
        }
    }
    out.sort_unstable();
    out
}

/// The numbers `first..=last` by how many digits they have when they are padded to `width`.
fn by_length(first: u64, last: u64, width: usize) -> impl Iterator<Item = (usize, u64, u64)> {
    let mut digits = width.max(1);
    let mut from = Some(first);
    std::iter::from_fn(move || {
        loop {
            let start = from?;
            let largest = u32::try_from(digits)
                .ok()
                .and_then(|d| 10u64.checked_pow(d))
                .map_or(u64::MAX, |next| next - 1);
            let at = digits;
            digits += 1;
            if start > largest {
                continue;
            }
            from = (last > largest).then(|| largest + 1);
            return Some((at, start, last.min(largest)));
        }
    })
}

/// Sorts the runs of one shape and reports those that meet one that begins before them. Afterwards each run's
/// `last` and `file` are those of the run that reaches furthest up to here: what [`holder`] needs.
fn among(runs: &mut [Run], out: &mut Vec<Clash>) {
    runs.sort_unstable_by_key(|run| (run.first, run.file));
    let mut furthest: Option<Run> = None;
    for run in runs {
        if let Some(before) = furthest
            && run.first <= before.last
        {
            let (later, earlier) = match before.file < run.file {
                true => (&*run, &before),
                false => (&before, &*run),
            };
            out.push(Clash {
                file: later.file,
                chunk: run.first - later.origin,
                owner: earlier.file,
                count: run.last.min(before.last) - run.first + 1,
            });
            if before.last >= run.last {
                let first = run.first;
                *run = Run { first, ..before };
            }
        }
        furthest = Some(*run);
    }
}

/// The run with this number, among those that [`among`] prepared.
fn holder(runs: &[Run], number: u64) -> Option<Run> {
    let behind = runs.partition_point(|run| run.first <= number);
    let run = runs.get(behind.checked_sub(1)?)?;
    (number <= run.last).then_some(*run)
}

/// The shape and the number of an id; `None` where no pattern can have it.
fn shape_of(id: &str) -> Option<(Shape<'_>, u64)> {
    let is_digit = |c: char| c.is_ascii_digit();
    let end = id.rfind(is_digit)? + 1;
    let start = id[..end].trim_end_matches(is_digit).len();
    let number = id[start..end].parse().ok()?;
    Some(((&id[..start], &id[end..], end - start), number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// A pattern or a list, with heads, tails and widths that often meet.
    fn ids() -> impl Strategy<Value = ObjectIds> {
        let list = prop::collection::vec("[ab]?/?[019]{1,3}[ab]?", 1..5).prop_map(|mut list| {
            let mut seen = BTreeSet::new();
            list.retain(|id| seen.insert(id.clone()));
            ObjectIds::from_list(list)
        });
        let counted = ("[ab]{0,1}", 0u64..1200, 1u64..120, 1usize..5, "[ab]{0,1}").prop_map(
            |(head, first, count, width, tail)| {
                ObjectIds::from_list(
                    (first..first + count)
                        .map(|n| format!("{head}{n:0width$}{tail}"))
                        .collect(),
                )
            },
        );
        let derived = ("[ab]", 1u64..1200).prop_map(|(prefix, count)| ObjectIds::derived(&prefix, count));
        prop_oneof![list, counted, derived]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn as_if_they_were_counted_out(files in prop::collection::vec(ids(), 2..5)) {
            let all: Vec<BTreeSet<String>> =
                files.iter().map(|ids| ids.iter().map(|id| id.into_owned()).collect()).collect();
            let found = clashes(&files.iter().collect::<Vec<_>>());
            for clash in &found {
                prop_assert!(clash.owner < clash.file);
                let id = files[clash.file].get(clash.chunk).unwrap();
                prop_assert!(all[clash.owner].contains(&*id), "{:?} is no clash", clash);
                let common = all[clash.file].intersection(&all[clash.owner]).count() as u64;
                prop_assert!((1..=common).contains(&clash.count), "{:?} of {common}", clash);
            }
            let met = |a: usize, b: usize| !all[a].is_disjoint(&all[b]);
            for file in 0..files.len() {
                let meets = (0..files.len()).any(|other| other != file && met(file, other));
                let named = found.iter().any(|c| c.file == file || c.owner == file);
                prop_assert_eq!(meets, named, "file {}", file);
            }
        }
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let edge = ObjectIds::Pattern {
            head: "a".into(),
            first: 999_999_999_999_999_999,
            width: 18,
            tail: String::new(),
            count: u64::MAX,
        };
        let list = ObjectIds::List(vec![
            "a18446744073709551615".into(),
            "a18446744073709551616".into(),
            "b".into(),
        ]);
        let found = clashes(&[&edge, &list]);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].file, found[0].chunk, found[0].owner), (1, 0, 0));
        let found = clashes(&[&edge, &edge.clone()]);
        assert_eq!(found.len(), 3, "18, 19 and 20 digits");
        assert_eq!((found[0].chunk, found[0].count), (0, 1));
    }
}
