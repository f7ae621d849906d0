//! Many small models, made before anything starts.

use crate::model::Model;
use anyhow::{Context, Result};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use std::{collections::BTreeMap, path::Path};

/// Sizes of a model's files: from nearly nothing to a few blocks.
const MAX_FILE_BYTES: u64 = 768 << 10;
const MAX_FILES: usize = 3;

/// One model: its request without ids and nodes, and what its folder must be.
#[derive(Clone, Debug)]
pub struct Template {
    /// `model_id`.
    pub id: String,
    request: Value,
    /// Paths with size and SHA-256.
    pub files: BTreeMap<String, (u64, String)>,
}

/// All models of a run.
#[derive(Debug, Default)]
pub struct Library {
    /// In the order in which callers take them.
    pub models: Vec<Template>,
}

impl Library {
    /// Makes `count` models of random sizes below `folder`, which is what the source at `url` serves.
    pub fn create(folder: &Path, url: &str, count: usize, seed: u64) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(seed);
        let models = (0..count).map(|i| {
            let id = format!("m-{i}");
            let names: Vec<String> = (0..rng.random_range(1..=MAX_FILES))
                .map(|n| format!("part-{n}.bin"))
                .collect();
            let files: Vec<(&str, u64)> = names
                .iter()
                .map(|name| (name.as_str(), rng.random_range(1..=MAX_FILE_BYTES)))
                .collect();
            let mut model = Model::create(&folder.join(&id), &id, &files)?;
            model.chunk_size = 256 << 10;
            Template::of(&model, &format!("{url}/{id}"))
        });
        let models = models.collect::<Result<_>>().context("making the models")?;
        Ok(Self { models })
    }

    /// The model that no caller asks for.
    pub fn reserved(&self) -> Option<&Template> {
        self.models.last()
    }

    /// The model of this `model_id`.
    pub fn model(&self, id: &str) -> Option<&Template> {
        self.models.iter().find(|m| m.id == id)
    }
}

impl Template {
    /// Of a model whose files are below `base`.
    pub fn of(model: &Model, base: &str) -> Result<Self> {
        Ok(Self {
            id: model.id.clone(),
            request: model.request("", base, "", &[])?,
            files: model.files()?,
        })
    }

    /// The request for one job.
    pub fn request(&self, job: &str, seed: &str, targets: &[String], max_attempts: u32) -> Value {
        let mut request = self.request.clone();
        request["job_id"] = json!(job);
        request["seed_node_id"] = json!(seed);
        request["target_nodes"] = json!(targets);
        request["policy"] = json!({"max_attempts": max_attempts});
        request
    }
}
