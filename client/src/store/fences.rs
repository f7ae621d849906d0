//! The highest fence obeyed per artifact, on disk before an order is followed.

use super::{
    durable::{self, ANY_POINTS, Kind},
    error::{FenceError, StoreError},
    types::Fence,
};
use mooncake_proto::{codec, ids::ModelRef};
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
            highest: content.highest,
            clock: content.clock,
            entries,
        })
    }

    pub(crate) fn highest(&self) -> Fence {
        self.highest
    }

    pub(crate) fn of(&self, model: &ModelRef) -> Fence {
        self.entries
            .get(model)
            .map(|(fence, _)| *fence)
            .unwrap_or_default()
    }

    /// See [`Store::obey`](super::Store::obey).
    pub(crate) fn obey(&mut self, model: &ModelRef, fence: Fence) -> Result<(), FenceError> {
        let known = self.entries.get(model).copied();
        match known {
            Some((highest, _)) if fence < highest => {
                return Err(FenceError::Stale {
                    model: Box::new(model.clone()),
                    given: fence,
                    highest,
                });
            }
            Some((highest, _)) if fence == highest => return Ok(()),
            _ => {}
        }
        let highest_before = self.highest;
        self.clock += 1;
        self.entries.insert(model.clone(), (fence, self.clock));
        self.highest = self.highest.max(fence);
        if self.entries.len() > MAX_FENCES
            && let Some(oldest) = self
                .entries
                .iter()
                .min_by_key(|(_, (_, at))| *at)
                .map(|(m, _)| m.clone())
        {
            self.entries.remove(&oldest);
        }
        let content = Content {
            highest: self.highest,
            clock: self.clock,
            entries: self
                .entries
                .iter()
                .map(|(m, (f, at))| (m.clone(), *f, *at))
                .collect(),
        };
        durable::write(&self.path, KIND, &codec::encode(ENCODING, &content)).map_err(|e| {
            // Not durable, so not obeyed: the order may be sent again and is then written again.
            self.highest = highest_before;
            match known {
                Some(before) => self.entries.insert(model.clone(), before),
                None => self.entries.remove(model),
            };
            FenceError::Store(e)
        })
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
        let mut fences = Fences::open(path.clone()).unwrap();
        assert_eq!(fences.highest(), Fence::default());
        fences.obey(&model(1), fence(0, 5)).unwrap();
        fences.obey(&model(1), fence(0, 5)).unwrap();
        fences.obey(&model(2), fence(0, 1)).unwrap();
        let mut fences = Fences::open(path.clone()).unwrap();
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
    fn what_is_not_durable_is_not_obeyed() {
        let dir = tempfile::tempdir().unwrap();
        let mut fences = Fences::open(dir.path().join("gone/fences")).unwrap();
        assert!(matches!(
            fences.obey(&model(1), fence(0, 1)),
            Err(FenceError::Store(_))
        ));
        assert_eq!(fences.highest(), Fence::default());
        assert_eq!(fences.of(&model(1)), Fence::default());
    }
}
