//! The highest fence obeyed per artifact, on disk before an order is followed; and the highest recovery epoch of any
//! master that this node had a session with, below which nothing is obeyed.

use super::{
    durable::{self, ANY_POINTS, Kind},
    error::{EpochError, FenceError, StoreError},
    types::Fence,
};
use mooncake_proto::{codec, ids::ModelRef};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::PathBuf};

const KIND: Kind = Kind {
    magic: b"MCFENCES",
    version: 1,
    points: ANY_POINTS,
};
/// Version byte of the encoding. Frozen: it is on disks.
const ENCODING: u8 = 1;
/// Most artifacts remembered; the longest untouched is forgotten first. A node that has seen this many
/// since then gets no orders of that age any more; one that came would do work that the master, which
/// compares attempts itself, ignores. Keeps the file at a few MiB.
const MAX_FENCES: usize = 16_384;

#[derive(Debug, Default, Serialize, Deserialize)]
struct Content {
    /// Over all artifacts ever, those forgotten too.
    highest: Fence,
    /// Counts changes: tells which entry was touched last.
    clock: u64,
    entries: Vec<(ModelRef, Fence, u64)>,
}

/// The file and its content.
#[derive(Debug)]
pub(crate) struct Fences {
    path: PathBuf,
    /// Held across the write of the file: fences become durable one after the other. Taken before `known`.
    writing: Mutex<()>,
    /// What is durable. Short sections, never across I/O: it is read for every report.
    known: Mutex<Known>,
}

#[derive(Debug)]
struct Known {
    highest: Fence,
    clock: u64,
    entries: BTreeMap<ModelRef, (Fence, u64)>,
}

impl Fences {
    pub(crate) fn open(path: PathBuf) -> Result<Self, StoreError> {
        let content: Content = match durable::read(&path, KIND)? {
            None => Content::default(),
            Some(bytes) => codec::decode(ENCODING, &bytes).map_err(|e| StoreError::Damaged {
                path: path.clone(),
                why: e.to_string(),
            })?,
        };
        let entries = content
            .entries
            .into_iter()
            .map(|(m, f, at)| (m, (f, at)))
            .collect();
        Ok(Self {
            path,
            writing: Mutex::default(),
            known: Mutex::new(Known {
                highest: content.highest,
                clock: content.clock,
                entries,
            }),
        })
    }

    pub(crate) fn highest(&self) -> Fence {
        self.known.lock().highest
    }

    pub(crate) fn of(&self, model: &ModelRef) -> Fence {
        self.known.lock().of(model).unwrap_or_default()
    }

    /// See [`Store::enter_epoch`](super::Store::enter_epoch).
    pub(crate) fn enter_epoch(&self, epoch: u64) -> Result<(), EpochError> {
        let _writing = self.writing.lock();
        let content = {
            let known = self.known.lock();
            let highest = known.highest.recovery_epoch;
            if epoch < highest {
                return Err(EpochError::Old {
                    given: epoch,
                    highest,
                });
            }
            if epoch == highest {
                return Ok(());
            }
            let highest = Fence {
                recovery_epoch: epoch,
                attempt: 0,
            };
            Content {
                highest,
                clock: known.clock,
                entries: known
                    .entries
                    .iter()
                    .map(|(m, (f, at))| (m.clone(), *f, *at))
                    .collect(),
            }
        };
        durable::write(&self.path, KIND, &codec::encode(ENCODING, &content)).map_err(EpochError::Store)?;
        self.known.lock().highest = content.highest;
        Ok(())
    }

    /// See [`Store::obey`](super::Store::obey). What could not be written is not obeyed: the order may be sent
    /// again and is then written again.
    pub(crate) fn obey(&self, model: &ModelRef, fence: Fence) -> Result<(), FenceError> {
        let _writing = self.writing.lock();
        let (content, forgotten) = {
            let known = self.known.lock();
            if fence.recovery_epoch < known.highest.recovery_epoch {
                return Err(FenceError::Stale {
                    model: Box::new(model.clone()),
                    given: fence,
                    highest: known.highest,
                });
            }
            match known.of(model) {
                Some(highest) if fence < highest => {
                    return Err(FenceError::Stale {
                        model: Box::new(model.clone()),
                        given: fence,
                        highest,
                    });
                }
                Some(highest) if fence == highest => return Ok(()),
                _ => {}
            }
            known.with(model, fence)
        };
        durable::write(&self.path, KIND, &codec::encode(ENCODING, &content)).map_err(FenceError::Store)?;
        let mut known = self.known.lock();
        known.highest = content.highest;
        known.clock = content.clock;
        known.entries.insert(model.clone(), (fence, content.clock));
        if let Some(oldest) = forgotten {
            known.entries.remove(&oldest);
        }
        Ok(())
    }
}

impl Known {
    fn of(&self, model: &ModelRef) -> Option<Fence> {
        self.entries.get(model).map(|(fence, _)| *fence)
    }

    /// The file's next content, and who is no longer in it.
    fn with(&self, model: &ModelRef, fence: Fence) -> (Content, Option<ModelRef>) {
        let clock = self.clock + 1;
        let others = || self.entries.iter().filter(|(m, _)| *m != model);
        let forgotten = if others().count() >= MAX_FENCES {
            others().min_by_key(|(_, (_, at))| *at).map(|(m, _)| m.clone())
        } else {
            None
        };
        let entries = others()
            .filter(|(m, _)| Some(*m) != forgotten.as_ref())
            .map(|(m, (f, at))| (m.clone(), *f, *at))
            .chain([(model.clone(), fence, clock)])
            .collect();
        let highest = self.highest.max(fence);
        let content = Content {
            highest,
            clock,
            entries,
        };
        (content, forgotten)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(n: u32) -> ModelRef {
        ModelRef {
            model_id: format!("m{n}"),
            revision: "r".into(),
            format: "f".into(),
            provider: "p".into(),
        }
    }

    fn fence(recovery_epoch: u64, attempt: u64) -> Fence {
        Fence {
            recovery_epoch,
            attempt,
        }
    }

    #[test]
    fn only_upwards_per_artifact_and_across_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fences");
        let fences = Fences::open(path.clone()).unwrap();
        assert_eq!(fences.highest(), Fence::default());
        fences.obey(&model(1), fence(0, 5)).unwrap();
        fences.obey(&model(1), fence(0, 5)).unwrap();
        fences.obey(&model(2), fence(0, 1)).unwrap();
        let fences = Fences::open(path.clone()).unwrap();
        assert!(matches!(
            fences.obey(&model(1), fence(0, 4)),
            Err(FenceError::Stale { .. })
        ));
        fences.obey(&model(1), fence(1, 0)).unwrap();
        assert!(matches!(
            fences.obey(&model(1), fence(0, 99)),
            Err(FenceError::Stale { .. })
        ));
        let fences = Fences::open(path).unwrap();
        assert_eq!(fences.highest(), fence(1, 0));
        assert_eq!(fences.of(&model(2)), fence(0, 1));
        assert_eq!(fences.of(&model(3)), Fence::default());
    }

    #[test]
    fn an_old_life_of_the_masters_is_over_for_good() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fences");
        let fences = Fences::open(path.clone()).unwrap();
        fences.enter_epoch(0).unwrap();
        fences.obey(&model(1), fence(0, 5)).unwrap();
        fences.enter_epoch(7).unwrap();
        fences.enter_epoch(7).unwrap();
        // Before any order of the new life, and after a restart.
        let fences = Fences::open(path).unwrap();
        assert!(matches!(
            fences.enter_epoch(6),
            Err(EpochError::Old { given: 6, highest: 7 })
        ));
        for (number, attempt) in [(1, 9), (2, 1)] {
            let order = fences.obey(&model(number), fence(6, attempt));
            assert!(matches!(order, Err(FenceError::Stale { .. })), "model {number}");
        }
        assert_eq!(
            fences.of(&model(1)),
            fence(0, 5),
            "what was obeyed is not forgotten"
        );
        fences.obey(&model(1), fence(7, 6)).unwrap();
        assert_eq!(fences.highest(), fence(7, 6));
    }

    #[test]
    fn reading_does_not_wait_for_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let fences = Fences::open(dir.path().join("fences")).unwrap();
        fences.obey(&model(1), fence(0, 5)).unwrap();
        // As held while an order's fence is written.
        let _writing = fences.writing.lock();
        assert_eq!(
            (fences.highest(), fences.of(&model(1))),
            (fence(0, 5), fence(0, 5))
        );
    }

    #[test]
    fn the_longest_untouched_is_forgotten() {
        let entries = (0..MAX_FENCES as u32).map(|n| (model(n), (fence(0, 1), u64::from(n) + 1)));
        let mut known = Known {
            highest: fence(0, 1),
            clock: MAX_FENCES as u64,
            entries: entries.collect(),
        };
        let (content, forgotten) = known.with(&model(MAX_FENCES as u32), fence(0, 2));
        assert_eq!((content.entries.len(), forgotten), (MAX_FENCES, Some(model(0))));
        known.entries.remove(&model(0));
        let (content, forgotten) = known.with(&model(7), fence(0, 2));
        assert_eq!((content.entries.len(), forgotten), (MAX_FENCES - 1, None));
    }

    #[test]
    fn what_is_not_durable_is_not_obeyed() {
        let dir = tempfile::tempdir().unwrap();
        let fences = Fences::open(dir.path().join("gone/fences")).unwrap();
        assert!(matches!(
            fences.obey(&model(1), fence(0, 1)),
            Err(FenceError::Store(_))
        ));
        assert_eq!(fences.highest(), Fence::default());
        assert_eq!(fences.of(&model(1)), Fence::default());
    }
}
