//! The state, its derived indexes, its encoding.

use crate::{
    PRIORITY_CLUSTER_VERSION,
    bytes::{Shared, map},
    types::*,
};
use imbl::{OrdMap, OrdSet};
use mooncake_proto::{
    api::{JobStatus, NodeStatus, PlacementState},
    codec::{self, CodecError},
    digest::Digest,
    ids::{JobId, ModelRef, NodeId},
    manifest::{Manifest, Sources},
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version byte of [`State::encode_snapshot`] below [`PRIORITY_CLUSTER_VERSION`]. Frozen: it is on the masters' disks.
pub const SNAPSHOT_VERSION_1: u8 = 1;
/// From then on: as version 1, and then the priorities that are not 0, by job. Frozen like it.
pub const SNAPSHOT_VERSION_2: u8 = 2;
/// The newest cluster version that this build can run under.
pub const SUPPORTED_CLUSTER_VERSION: u32 = PRIORITY_CLUSTER_VERSION;

/// The replicated state. Its maps are persistent ones: cloning it takes the same short time however large it is, and what
/// is changed while a clone lives is copied then, a few records at a time (of a model version all its placements). So neither
/// a snapshot nor a reader holds up the entries behind it.
#[derive(Clone, Debug)]
pub struct State {
    pub(crate) data: Data,
    pub(crate) index: Index,
    /// Proves the tests: with it on, reports are not fenced and an invariant must notice.
    #[cfg(any(test, feature = "sabotage"))]
    pub break_fence: bool,
}

/// What is in snapshots and in the digest. The order of the fields is frozen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Data {
    /// The highest time any applied command carried.
    pub(crate) time_ms: u64,
    pub(crate) cluster_version: u32,
    pub(crate) recovery_epoch: u64,
    pub(crate) limits: Limits,
    /// The highest incarnation of any node that was forgotten: a node that returns is above it.
    pub(crate) floor_incarnation: u64,
    /// The highest attempt and generation of any artifact that was forgotten: one that returns is above them,
    /// as the nodes remember the fences they obeyed.
    pub(crate) floor_attempt: u64,
    pub(crate) floor_generation: u64,
    #[serde(with = "map")]
    pub(crate) nodes: OrdMap<NodeId, Node>,
    #[serde(with = "map")]
    pub(crate) blobs: OrdMap<Digest, Blob>,
    #[serde(with = "map")]
    pub(crate) artifacts: OrdMap<ModelRef, Shared<Artifact>>,
    #[serde(with = "map")]
    pub(crate) jobs: OrdMap<JobId, Shared<Job>>,
    #[serde(with = "map")]
    pub(crate) past_jobs: OrdMap<JobId, PastJob>,
}

/// Derived from [`Data`]; rebuilt when a snapshot is read, never encoded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Index {
    /// Live jobs by what they want.
    pub(crate) live_by_model: OrdMap<ModelRef, OrdSet<JobId>>,
    /// Live jobs by the nodes they name, the seed included.
    pub(crate) live_by_node: OrdMap<NodeId, OrdSet<JobId>>,
    /// Artifacts with a placement on the node.
    pub(crate) models_by_node: OrdMap<NodeId, OrdSet<ModelRef>>,
    /// Deadlines of live jobs.
    pub(crate) deadlines: OrdSet<(u64, JobId)>,
    /// Terminal jobs by when they ended.
    pub(crate) terminal: OrdSet<(u64, JobId)>,
    /// All jobs by when they were created.
    pub(crate) created: OrdSet<(u64, JobId)>,
    /// Pruned jobs by when they ended.
    pub(crate) past: OrdSet<(u64, JobId)>,
    /// References to blobs: artifacts to manifests, live jobs and running downloads to sources.
    pub(crate) blob_refs: OrdMap<Digest, u32>,
    /// Blobs that nothing refers to: they wait for their jobs, or for their end.
    pub(crate) unreferenced: OrdSet<Digest>,
    /// Sum over all blobs.
    pub(crate) blob_bytes: u64,
    /// Unsealed artifacts that nobody wants, by since when.
    pub(crate) unwanted: OrdSet<(u64, ModelRef)>,
}

impl Default for State {
    fn default() -> Self {
        Self::new()
    }
}

fn insert<K: Ord + Clone, V: Ord + Clone>(map: &mut OrdMap<K, OrdSet<V>>, key: &K, value: &V) {
    match map.get_mut(key) {
        Some(set) => {
            set.insert(value.clone());
        }
        None => {
            map.insert(key.clone(), OrdSet::unit(value.clone()));
        }
    }
}

fn remove<K: Ord + Clone, V: Ord + Clone>(map: &mut OrdMap<K, OrdSet<V>>, key: &K, value: &V) {
    if let Some(set) = map.get_mut(key) {
        set.remove(value);
        if set.is_empty() {
            map.remove(key);
        }
    }
}

impl Index {
    pub(crate) fn of(data: &Data) -> Self {
        let mut index = Self::default();
        for (id, job) in &data.jobs {
            index.add_job(id, job);
        }
        for (model, artifact) in &data.artifacts {
            index.refer(artifact.manifest);
            for (node, placement) in &artifact.placements {
                insert(&mut index.models_by_node, node, model);
                if let Some(sources) = placement.sources {
                    index.refer(sources);
                }
            }
            index.set_unwanted(model, None, artifact);
        }
        for (id, past) in &data.past_jobs {
            index.past.insert((past.finished_ms, id.clone()));
        }
        for (digest, blob) in &data.blobs {
            index.add_blob(digest, blob);
        }
        index
    }

    /// One more reference.
    pub(crate) fn refer(&mut self, digest: Digest) {
        *self.blob_refs.entry(digest).or_default() += 1;
        self.unreferenced.remove(&digest);
    }

    /// One reference less; whether it was the last one.
    pub(crate) fn release(&mut self, digest: &Digest) -> bool {
        let refs = self.blob_refs.get_mut(digest);
        let refs = refs.expect("a released blob was referred to");
        *refs -= 1;
        let last = *refs == 0;
        if last {
            self.blob_refs.remove(digest);
            self.unreferenced.insert(*digest);
        }
        last
    }

    fn add_blob(&mut self, digest: &Digest, blob: &Blob) {
        self.blob_bytes += blob.content.len();
        if !self.blob_refs.contains_key(digest) {
            self.unreferenced.insert(*digest);
        }
    }

    pub(crate) fn add_job(&mut self, id: &JobId, job: &Job) {
        self.created.insert((job.created_ms(), id.clone()));
        if let Some(at) = job.finished_ms() {
            self.terminal.insert((at, id.clone()));
            return;
        }
        insert(&mut self.live_by_model, &job.model, id);
        for node in job.nodes() {
            insert(&mut self.live_by_node, node, id);
        }
        if let Some(at) = job.deadline_ms {
            self.deadlines.insert((at, id.clone()));
        }
        self.refer(job.sources);
    }

    /// A job that was live has just become terminal.
    pub(crate) fn end_job(&mut self, id: &JobId, job: &Job) {
        remove(&mut self.live_by_model, &job.model, id);
        for node in job.nodes() {
            remove(&mut self.live_by_node, node, id);
        }
        if let Some(at) = job.deadline_ms {
            self.deadlines.remove(&(at, id.clone()));
        }
        self.terminal
            .insert((job.finished_ms().expect("the job is terminal"), id.clone()));
    }

    pub(crate) fn add_placement(&mut self, model: &ModelRef, node: &NodeId) {
        insert(&mut self.models_by_node, node, model);
    }

    pub(crate) fn remove_placement(&mut self, model: &ModelRef, node: &NodeId) {
        remove(&mut self.models_by_node, node, model);
    }

    /// Keeps `unwanted` in step: `before` is the artifact's old `unwanted_since_ms`.
    pub(crate) fn set_unwanted(&mut self, model: &ModelRef, before: Option<u64>, artifact: &Artifact) {
        if let Some(at) = before {
            self.unwanted.remove(&(at, model.clone()));
        }
        if let (Some(at), None) = (artifact.unwanted_since_ms, artifact.seal) {
            self.unwanted.insert((at, model.clone()));
        }
    }
}

impl State {
    /// Keeps a blob, in place of what there was under this digest.
    pub(crate) fn put_blob(&mut self, digest: Digest, blob: Blob) {
        self.remove_blob(&digest);
        self.index.add_blob(&digest, &blob);
        self.data.blobs.insert(digest, blob);
    }

    pub(crate) fn remove_blob(&mut self, digest: &Digest) {
        if let Some(blob) = self.data.blobs.remove(digest) {
            self.index.blob_bytes -= blob.content.len();
            self.index.unreferenced.remove(digest);
        }
    }

    /// Blobs that nothing refers to.
    pub(crate) fn unreferenced_blobs(&self) -> impl Iterator<Item = (&Digest, &Blob)> {
        let digests = self.index.unreferenced.iter();
        digests.filter_map(|digest| Some((digest, self.data.blobs.get(digest)?)))
    }

    /// The state before the first command.
    pub fn new() -> Self {
        Self::of(Data {
            time_ms: 0,
            cluster_version: 1,
            recovery_epoch: 0,
            limits: Limits::default(),
            floor_incarnation: 0,
            floor_attempt: 0,
            floor_generation: 0,
            nodes: OrdMap::new(),
            blobs: OrdMap::new(),
            artifacts: OrdMap::new(),
            jobs: OrdMap::new(),
            past_jobs: OrdMap::new(),
        })
    }

    fn of(data: Data) -> Self {
        let index = Index::of(&data);
        Self {
            data,
            index,
            #[cfg(any(test, feature = "sabotage"))]
            break_fence: false,
        }
    }

    /// The canonical encoding: two states are equal if and only if these bytes are. Until every master can read the
    /// second version (which the cluster version says) it is the first, byte by byte: masters of before install it, and
    /// compare its digest.
    pub fn encode_snapshot(&self) -> Vec<u8> {
        if self.data.cluster_version < PRIORITY_CLUSTER_VERSION {
            return codec::encode(SNAPSHOT_VERSION_1, &self.data);
        }
        let priorities: BTreeMap<&JobId, i8> = self
            .jobs()
            .filter(|(_, job)| job.priority != 0)
            .map(|(id, job)| (id, job.priority))
            .collect();
        codec::encode(SNAPSHOT_VERSION_2, &(&self.data, priorities))
    }

    /// Reads [`State::encode_snapshot`]'s bytes. The caller has checked their integrity (snapshot files carry a
    /// SHA-256); this checks the version and the form.
    pub fn decode_snapshot(bytes: &[u8]) -> Result<Self, CodecError> {
        if bytes.first() == Some(&SNAPSHOT_VERSION_1) {
            return Ok(Self::of(codec::decode(SNAPSHOT_VERSION_1, bytes)?));
        }
        let (mut data, priorities): (Data, BTreeMap<JobId, i8>) = codec::decode(SNAPSHOT_VERSION_2, bytes)?;
        for (id, priority) in priorities {
            let job = data.jobs.get_mut(&id);
            let job = job
                .ok_or_else(|| CodecError::Damaged(format!("a priority of job {id}, which is not there")))?;
            job.make_mut().priority = priority;
        }
        Ok(Self::of(data))
    }

    /// SHA-256 of the canonical encoding. Linear in the state: for status pages and tests, not for every command.
    pub fn digest(&self) -> Digest {
        Digest::sha256(&self.encode_snapshot())
    }

    /// The highest time of any applied command.
    pub fn time_ms(&self) -> u64 {
        self.data.time_ms
    }

    /// The gate for commands. A master whose [`SUPPORTED_CLUSTER_VERSION`] is lower must stop.
    pub fn cluster_version(&self) -> u32 {
        self.data.cluster_version
    }

    /// The first half of every new fence.
    pub fn recovery_epoch(&self) -> u64 {
        self.data.recovery_epoch
    }

    /// Retention.
    pub fn limits(&self) -> &Limits {
        &self.data.limits
    }

    /// A node.
    pub fn node(&self, id: &NodeId) -> Option<&Node> {
        self.data.nodes.get(id)
    }

    /// All nodes, by id.
    pub fn nodes(&self) -> impl Iterator<Item = (&NodeId, &Node)> {
        self.data.nodes.iter()
    }

    /// A model version.
    pub fn artifact(&self, model: &ModelRef) -> Option<&Artifact> {
        self.data.artifacts.get(model).map(|artifact| &**artifact)
    }

    /// All model versions, by name.
    pub fn artifacts(&self) -> impl Iterator<Item = (&ModelRef, &Artifact)> {
        self.data
            .artifacts
            .iter()
            .map(|(model, artifact)| (model, &**artifact))
    }

    /// A job.
    pub fn job(&self, id: &JobId) -> Option<&Job> {
        self.data.jobs.get(id).map(|j| &**j)
    }

    /// All jobs, by id.
    pub fn jobs(&self) -> impl Iterator<Item = (&JobId, &Job)> {
        self.data.jobs.iter().map(|(id, job)| (id, &**job))
    }

    /// What is kept of a job that was pruned.
    pub fn past_job(&self, id: &JobId) -> Option<&PastJob> {
        self.data.past_jobs.get(id)
    }

    /// Jobs, newest first, that come after `(created_ms, id)` in this order (none: from the newest).
    pub fn jobs_newest_first(&self, after: Option<(u64, JobId)>) -> impl Iterator<Item = (&JobId, &Job)> {
        use std::ops::Bound::{Excluded, Unbounded};
        let end = after.map_or(Unbounded, Excluded);
        self.index
            .created
            .range((Unbounded, end))
            .rev()
            .map(|(_, id)| (id, &*self.data.jobs[id]))
    }

    /// Live jobs that want this artifact, by id.
    pub fn live_jobs_of(&self, model: &ModelRef) -> impl Iterator<Item = (&JobId, &Job)> {
        let ids = self.index.live_by_model.get(model).into_iter().flatten();
        ids.map(|id| (id, &*self.data.jobs[id]))
    }

    /// Artifacts that live jobs want.
    pub fn wanted_models(&self) -> impl Iterator<Item = &ModelRef> {
        self.index.live_by_model.keys()
    }

    /// Artifacts with a placement on the node.
    pub fn models_on(&self, node: &NodeId) -> impl Iterator<Item = &ModelRef> {
        self.index.models_by_node.get(node).into_iter().flatten()
    }

    /// Downloads at work on the node. One that holds every byte and has only to publish is none any more.
    pub fn downloads_on(&self, node: &NodeId) -> usize {
        let Some(record) = self.node(node) else { return 0 };
        self.models_on(node)
            .filter_map(|m| self.data.artifacts.get(m)?.placements.get(node))
            .filter(|p| p.incarnation == record.incarnation && p.state == PlacementState::Acquiring)
            .filter(|p| p.kind == TaskKind::Acquire && !p.whole)
            .count()
    }

    /// Live jobs that name the node.
    pub fn live_jobs_on(&self, node: &NodeId) -> impl Iterator<Item = (&JobId, &Job)> {
        let ids = self.index.live_by_node.get(node).into_iter().flatten();
        ids.map(|id| (id, &*self.data.jobs[id]))
    }

    /// Number of live jobs.
    pub fn live_job_count(&self) -> usize {
        self.data.jobs.len() - self.index.terminal.len()
    }

    /// The earliest deadline of a live job: propose [`crate::Command::Tick`] then.
    pub fn next_deadline_ms(&self) -> Option<u64> {
        self.index.deadlines.get_min().map(|(at, _)| *at)
    }

    /// A complete blob's bytes.
    pub fn blob(&self, digest: &Digest) -> Option<&crate::Bytes> {
        match &self.data.blobs.get(digest)?.content {
            BlobContent::Complete(bytes) => Some(bytes),
            BlobContent::Partial { .. } => None,
        }
    }

    /// A manifest. Decoding is linear in its size: callers that ask often keep it.
    pub fn manifest(&self, digest: &Digest) -> Option<Manifest> {
        Manifest::decode(self.blob(digest)?).ok()
    }

    /// A source list. See [`State::manifest`].
    pub fn sources(&self, digest: &Digest) -> Option<Sources> {
        Sources::decode(self.blob(digest)?).ok()
    }

    /// Whether the placement is on a live node that holds every byte of the artifact: staged, or acquired and
    /// sealed. `Suspected` counts as live: the grace decides.
    pub fn is_holder(&self, node: &NodeId, placement: &Placement) -> bool {
        (placement.whole || placement.state == PlacementState::Staged)
            && self
                .node(node)
                .is_some_and(|n| n.status != NodeStatus::Down && n.incarnation == placement.incarnation)
    }

    /// Live nodes that hold every byte, by id.
    pub fn holders<'a>(&'a self, artifact: &'a Artifact) -> impl Iterator<Item = &'a NodeId> {
        artifact
            .placements
            .iter()
            .filter(|(n, p)| self.is_holder(n, p))
            .map(|(n, _)| n)
    }

    /// Sealed, and some live node holds every byte: it is copied, not downloaded.
    pub fn is_available(&self, artifact: &Artifact) -> bool {
        artifact.seal.is_some() && self.holders(artifact).next().is_some()
    }

    /// Whether the running task of this placement serves a live job. A download serves every live job of its
    /// artifact, whoever asked for it first; once sealed it only has to publish, which is always wanted. A copy
    /// serves the jobs that wait for this node.
    pub fn is_wanted(&self, model: &ModelRef, node: &NodeId, placement: &Placement) -> bool {
        match placement.kind {
            TaskKind::Acquire if placement.whole => true,
            TaskKind::Acquire => self.index.live_by_model.contains_key(model),
            TaskKind::Replicate => self.is_waited_for(model, node),
        }
    }

    /// Whether a live job waits for the model to be on the node.
    fn is_waited_for(&self, model: &ModelRef, node: &NodeId) -> bool {
        self.live_jobs_of(model).any(|(_, job)| job.waits_for(node))
    }

    /// Whether the node is about to fetch bytes of the model: an attempt runs there, or the next one comes after a pause.
    /// A node that holds every byte and has only to publish fetches nothing.
    pub fn is_under_way(&self, model: &ModelRef, node: &NodeId) -> bool {
        let Some(artifact) = self.artifact(model) else {
            return false;
        };
        let Some(placement) = artifact.placements.get(node) else {
            return false;
        };
        let same = self
            .node(node)
            .is_some_and(|n| n.incarnation == placement.incarnation);
        let runs = match placement.state {
            PlacementState::Acquiring => true,
            PlacementState::Planned => {
                placement.failures > 0
                    && (self.is_target(model, node) || self.downloads_again(model, artifact, node, placement))
            }
            PlacementState::Staged | PlacementState::Failed => false,
        };
        same && !placement.whole && runs
    }

    /// Whether a live job has the node among its targets, and no end for it yet.
    fn is_target(&self, model: &ModelRef, node: &NodeId) -> bool {
        let mut jobs = self.live_jobs_of(model);
        jobs.any(|(_, job)| job.is_target(node) && job.is_open(node))
    }

    /// Whether the next download is this node's: it failed at one, nobody else downloads or has it, and it is the seed of
    /// a live job, of one whose first copies are gone too.
    fn downloads_again(
        &self,
        model: &ModelRef,
        artifact: &Artifact,
        node: &NodeId,
        placement: &Placement,
    ) -> bool {
        placement.kind == TaskKind::Acquire
            && artifact.acquiring.is_none()
            && !self.is_available(artifact)
            && self
                .live_jobs_of(model)
                .any(|(_, job)| job.seed == *node && job.may_download())
    }

    /// Whether a live job would notice if this node went down now: something runs there or waits to, or it holds
    /// what live jobs want.
    pub fn is_needed(&self, node: &NodeId) -> bool {
        let waited_for = self.live_jobs_on(node).any(|(_, job)| job.waits_for(node));
        waited_for
            || self.models_on(node).any(|model| {
                let placement = self
                    .data
                    .artifacts
                    .get(model)
                    .and_then(|a| a.placements.get(node));
                placement.is_some_and(|p| {
                    p.state == PlacementState::Acquiring
                        || (self.index.live_by_model.contains_key(model) && self.is_holder(node, p))
                })
            })
    }

    /// Free bytes on the node that no attempt authorised since the measurement has taken; `None`: unknown.
    pub fn unreserved_bytes(&self, node: &NodeId) -> Option<u64> {
        let record = self.node(node)?;
        if record.about.capacity_bytes == 0 {
            return None;
        }
        let taken: u64 = self
            .models_on(node)
            .filter_map(|m| self.data.artifacts.get(m)?.placements.get(node))
            .filter(|p| p.incarnation == record.incarnation)
            .filter(|p| matches!(p.state, PlacementState::Acquiring | PlacementState::Staged))
            // An attempt takes its space when its node begins with it, a moment after it was authorised: one that
            // was authorised well before the measurement is in the measured value.
            .filter(|p| p.authorised_ms.saturating_add(RESERVATION_LAG_MS) > record.free_at_ms)
            .map(|p| p.reserved_bytes)
            .sum();
        Some(record.about.free_bytes.saturating_sub(taken))
    }

    /// Whether [`crate::Command::Prune`] would remove something.
    pub fn prune_due(&self, now_ms: u64) -> bool {
        crate::apply::prune::is_due(self, now_ms)
    }

    /// Jobs by status.
    pub fn count_jobs(&self) -> BTreeMap<JobStatus, u64> {
        let mut counts = BTreeMap::new();
        for job in self.data.jobs.values() {
            *counts.entry(job.status).or_default() += 1;
        }
        counts
    }
}

/// How long after its authorisation an attempt may begin to take space on its node. A longer delay only makes
/// the check less exact: the node itself checks its disk before it starts.
pub(crate) const RESERVATION_LAG_MS: u64 = 10_000;
