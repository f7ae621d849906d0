//! MODEL_DOWNLOAD: reads a model version from outside, once, into the store.
//!
//! Every file is cut into the artifact's blocks. A block is written as soon as all of its bytes are there, so
//! that peers can have it before the file is complete; blocks that the store already holds are not asked for
//! again. Behind the transfer, file by file, the declared SHA-256 is computed from what was *written*.
//!
//! Guaranteed:
//! - Nothing outside the [`AllowList`] is read, nor before every file of the manifest was found inside it.
//! - [`acquire`] returns a seal only when every block is held and durable, every declared SHA-256 held, and
//!   the expected seal, if one was given, was reproduced.
//! - A file whose checksum, size or version turned out wrong is forgotten as a whole: none of its blocks is
//!   offered again, and the next attempt reads it from its start.
//! - Bytes beyond a file's declared size and bodies of error answers are never written.
//! - Memory in block buffers is bounded for the whole process ([`limits::BUFFER_BYTES`]).
//! - Canceling ends it within one disk operation; verified blocks stay.
//!
//! Not guaranteed:
//! - That peers did not receive blocks which a later checksum condemned: they hold them with the digests of
//!   the condemned copy, which the seal will not reproduce.
//! - For a file without a SHA-256, that an interrupted acquisition which goes on in another process reads the
//!   same version of it: versions (ETag, modification time) are compared only within one acquisition.
//! - A minimal speed: a source that sends one byte in every no-progress interval is not given up.

pub mod allow;
mod context;
mod hash;
pub mod http;
pub mod limits;
mod local;
#[cfg(test)]
mod tests;

pub use allow::{AllowList, Location, redact};
pub use limits::SourceConfig;

use crate::{
    store::{Artifact, ArtifactState},
    task::{TaskFailure, TransferCounters},
};
use context::{Context, SourceFile, disk_failure, quiet};
use mooncake_proto::manifest::{Seal, Sources};
use std::{collections::BTreeSet, sync::Arc};
use tokio::task::JoinSet;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// One MODEL_DOWNLOAD.
pub struct AcquireTask {
    /// Where the bytes go.
    pub artifact: Arc<Artifact>,
    /// Parallel to the manifest's files.
    pub sources: Sources,
    /// What may be read.
    pub allow: AllowList,
    /// Set when the artifact was sealed before: the result must be the same.
    pub expected_seal: Option<Seal>,
    /// Counts while it goes on.
    pub counters: Arc<TransferCounters>,
}

/// Reads everything that is missing, with the default time-outs. See the module docs.
pub async fn acquire(task: AcquireTask, cancel: CancellationToken) -> Result<Seal, TaskFailure> {
    acquire_with(task, SourceConfig::default(), cancel).await
}

/// [`acquire`] with other time-outs.
pub async fn acquire_with(
    task: AcquireTask,
    config: SourceConfig,
    cancel: CancellationToken,
) -> Result<Seal, TaskFailure> {
    let AcquireTask {
        artifact,
        sources,
        allow,
        expected_seal,
        counters,
    } = task;
    let model = artifact.model().clone();
    if let (ArtifactState::Staged { .. }, Some(seal)) = (artifact.state(), artifact.seal_if_whole()) {
        // Proven before it was published; there is nothing to read.
        return compare(seal, expected_seal);
    }
    let context = Arc::new(Context::new(artifact, allow, counters, config));
    let mut files = JoinSet::new();
    let result = tokio::select! {
        biased;
        () = cancel.cancelled() => Err(TaskFailure::canceled()),
        result = run(&context, &sources, &mut files) => result,
    };
    // Nothing of this acquisition touches the artifact after it has returned: first the transfers stop, then
    // the disk operations which they had begun end.
    files.shutdown().await;
    context.drain().await;
    let seal = match result {
        Ok(()) => seal(&context, expected_seal).await,
        Err(failure) => Err(failure),
    };
    match &seal {
        Ok(seal) => tracing::info!(%model, root = %seal.root, "acquired"),
        Err(failure) if failure.is_canceled() => tracing::info!(%model, "acquisition canceled"),
        Err(failure) => {
            tracing::warn!(%model, code = %failure.code, "acquisition failed: {}", failure.message)
        }
    }
    seal
}

/// Reads and hashes all files, [`limits::FILES_AT_ONCE`] at a time, in file order.
async fn run(
    context: &Arc<Context>,
    sources: &Sources,
    running: &mut JoinSet<Result<(), TaskFailure>>,
) -> Result<(), TaskFailure> {
    let mut files = plan(context, sources).await?.into_iter();
    loop {
        while running.len() < limits::FILES_AT_ONCE
            && let Some(file) = files.next()
        {
            running.spawn(one_file(context.clone(), Arc::new(file)));
        }
        match running.join_next().await {
            None => return Ok(()),
            Some(Ok(result)) => result?,
            Some(Err(e)) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
            Some(Err(_)) => return Err(TaskFailure::canceled()),
        }
    }
}

/// Every file that has bytes, after all sources were looked at: a job that must fail because of its last
/// source fails before it has read the first.
async fn plan(context: &Arc<Context>, sources: &Sources) -> Result<Vec<SourceFile>, TaskFailure> {
    let manifest = context.artifact.manifest();
    if sources.0.len() != manifest.files.len() {
        let message = format!(
            "the order names {} sources for {} files of {}: master and client disagree, please report this",
            sources.0.len(),
            manifest.files.len(),
            manifest.model
        );
        return Err(TaskFailure::permanent("source_invalid", message));
    }
    let mut files = Vec::new();
    for (index, (file, source)) in manifest.files.iter().zip(&sources.0).enumerate() {
        if file.size_bytes == 0 {
            continue;
        }
        let location = Location::parse(source).map_err(|mut failure| {
            failure.message = format!("'{}': {}", file.path, failure.message);
            failure
        })?;
        if let Location::Url(url) = &location
            && !context.allow.allows_url(url)
        {
            return Err(context.allow.refusal(&file.path, &location));
        }
        let carried_over = context
            .artifact
            .blocks()
            .of_file(index)
            .any(|b| context.artifact.has(b));
        files.push(SourceFile {
            path: file.path.clone(),
            size_bytes: file.size_bytes,
            checksum: file.checksum.clone(),
            location,
            blocks: context.artifact.blocks().of_file(index),
            carried_over,
            writes: TaskTracker::new(),
        });
    }
    let files = Arc::new(files);
    let (checked, looked_at) = (files.clone(), context.clone());
    context
        .blocking(move || {
            // One look per distinct source is enough for the list; sizes are compared per file.
            let mut seen = BTreeSet::new();
            checked.iter().try_for_each(|file| match &file.location {
                Location::Path(path) if seen.insert((path, file.size_bytes)) => {
                    local::open(&looked_at.allow, file).map(drop)
                }
                _ => Ok(()),
            })
        })
        .await?;
    Ok(Arc::unwrap_or_clone(files))
}

/// Transfers one file and, behind it, computes its checksum.
async fn one_file(context: Arc<Context>, file: Arc<SourceFile>) -> Result<(), TaskFailure> {
    let fetched = CancellationToken::new();
    let fetch = async {
        match &file.location {
            Location::Path(_) => local::fetch(&context, &file).await?,
            Location::Url(url) => http::fetch(&context, &file, url).await?,
        }
        fetched.cancel();
        Ok(())
    };
    let result = tokio::try_join!(fetch, hash::check(&context, &file, &fetched)).map(drop);
    if let Err(failure) = &result
        && CONDEMNS_FILE.contains(&failure.code.as_str())
    {
        // A write that lands after the blocks were forgotten would bring one back.
        quiet(&file.writes).await;
        context.forget(file.blocks.clone()).await?;
    }
    result
}

/// Failures after which what was read of the file cannot be trusted to be one version of it.
const CONDEMNS_FILE: [&str; 3] = ["checksum_mismatch", "source_changed", "size_mismatch"];

/// Makes everything durable, then computes the seal.
async fn seal(context: &Arc<Context>, expected: Option<Seal>) -> Result<Seal, TaskFailure> {
    let artifact = context.artifact.clone();
    let seal = context
        .blocking(move || {
            artifact.flush().map_err(|e| disk_failure(e.code(), &e))?;
            artifact.seal_if_whole().ok_or_else(|| blocks_lost(&artifact))
        })
        .await?;
    let result = compare(seal, expected);
    if result.is_err() {
        // Which block differs is not known; a copy that cannot be published must not be resumed.
        context.forget(0..context.artifact.blocks().len()).await?;
    }
    result
}

fn blocks_lost(artifact: &Artifact) -> TaskFailure {
    let missing = artifact.blocks().len() - artifact.have_count();
    let message = format!(
        "{missing} blocks of {} are missing although they were read: they were found damaged meanwhile, and will be \
         read again; check the disk",
        artifact.model()
    );
    TaskFailure::retryable("blocks_lost", message)
}

fn compare(seal: Seal, expected: Option<Seal>) -> Result<Seal, TaskFailure> {
    match expected {
        Some(expected) if expected != seal => Err(TaskFailure::permanent(
            "source_changed",
            format!(
                "the sources no longer have the content that was sealed for this model version: they give root {}, \
                 the seal is {}. Bring the original files back, or distribute the new content under another revision",
                seal.root, expected.root
            ),
        )),
        _ => Ok(seal),
    }
}
