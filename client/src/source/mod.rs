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
//! - Blocks that came from peers are not taken for the source's: with a declared SHA-256 they are kept as far
//!   as it holds (else the file is read anew, at once), without one they are given up and read again. A copy
//!   that reproduces the expected seal is proven as a whole, and needs no source.
//! - A file whose checksum, size or version turned out wrong is forgotten as a whole, also if another file
//!   fails first or the task is canceled: none of its blocks is offered again, and it is read from its start.
//! - Bytes beyond a file's declared size and bodies of error answers are never written.
//! - Memory in block buffers is bounded for the whole process ([`limits::MAX_BUFFERS`]).
//! - Canceling ends it within one operation of the own disk; verified blocks stay. A source that hangs is not waited
//!   for, nor is the own disk for ever: then the artifact's handle ends, so that nothing which lands later counts.
//! - A source on this machine that hangs stops only what needs it: calls to sources, buffers for them, and work on
//!   what is staged take turns apart from each other, and no model has more than its part of them.
//!
//! Not guaranteed:
//! - That peers did not receive blocks which a later checksum condemned: they hold them with the digests of
//!   the condemned copy, which the seal will not reproduce.
//! - For a file without a SHA-256, that an interrupted acquisition which goes on in another process reads the
//!   same version of it: versions (ETag, modification time) are compared only within one acquisition.
//! - Sources on this machine while more of them hang than [`limits::MAX_LOCAL_BUFFERS`] (or
//!   [`limits::SOURCE_CALLS`]) leaves room for: the others are then refused, as retryable, and say so.
//! - A minimal speed beyond [`SourceConfig::floor_bytes`] per connection.

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
    task::{TaskFailure, TransferCounters, quiet},
};
use context::{Context, SourceFile, disk_failure};
use futures_util::FutureExt;
use mooncake_proto::{
    digest::Digest,
    manifest::{Checksum, Seal, Sources},
};
use std::{collections::BTreeSet, panic::AssertUnwindSafe, sync::Arc};
use tokio::task::JoinSet;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Most blocking calls under way at once; of the web's, a look-up of a name for each connection.
pub const BLOCKING_CALLS: usize =
    limits::SOURCE_CALLS + limits::DISK_STEPS + limits::WRITES + limits::CONNECTIONS;

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

/// Reads everything that is missing. See the module docs.
pub async fn acquire(
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
    let context = Arc::new(Context::new(artifact, allow, counters, config));
    let mut files = JoinSet::new();
    let whole = async {
        if let Some(proven) = proven(&context, expected_seal).await? {
            return compare(proven, expected_seal);
        }
        let carried_over = run(&context, &sources, &mut files).await?;
        seal(&context, expected_seal, carried_over).await
    };
    // A fault of this program must not leave condemned blocks behind either.
    let whole = AssertUnwindSafe(whole).catch_unwind();
    let result = tokio::select! {
        biased;
        () = cancel.cancelled() => Ok(Err(TaskFailure::canceled())),
        result = whole => result,
    };
    let forgotten = finish(&context, &mut files).await;
    if let Err(failure) = &forgotten {
        tracing::error!(%model, code = %failure.code, "{}", failure.message);
    }
    let result = result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let seal = result.and_then(|seal| forgotten.map(|()| seal));
    match &seal {
        Ok(seal) => tracing::info!(%model, root = %seal.root, "acquired"),
        Err(failure) if failure.is_canceled() => tracing::info!(%model, "acquisition canceled"),
        Err(failure) => {
            tracing::warn!(%model, code = %failure.code, "acquisition failed: {}", failure.message)
        }
    }
    seal
}

/// Nothing of an acquisition touches the artifact after it has returned: first the transfers stop, then the
/// disk operations which they had begun end. Only then nothing can bring back what was condemned.
async fn finish(context: &Context, files: &mut JoinSet<Result<(), TaskFailure>>) -> Result<(), TaskFailure> {
    files.shutdown().await;
    context.drain().await;
    context.forget_all_condemned().await
}

/// The seal of a copy that needs no source: one that was published, or that reproduces the expected seal.
async fn proven(context: &Context, expected: Option<Seal>) -> Result<Option<Seal>, TaskFailure> {
    let artifact = context.artifact.clone();
    let work = move || {
        let Some(own) = artifact.seal_if_whole() else {
            return Ok(None);
        };
        if matches!(artifact.state(), ArtifactState::Staged { .. }) {
            return Ok(Some(own));
        }
        if expected != Some(own) {
            return Ok(None);
        }
        artifact.flush().map_err(|e| disk_failure(e.code(), &e))?;
        Ok(Some(own))
    };
    context.on_disk(work).await
}

/// Reads and hashes all files, [`limits::FILES_AT_ONCE`] at a time, in file order. Gives whether some blocks
/// are from an earlier acquisition.
async fn run(
    context: &Arc<Context>,
    sources: &Sources,
    running: &mut JoinSet<Result<(), TaskFailure>>,
) -> Result<bool, TaskFailure> {
    let files = plan(context, sources).await?;
    let carried_over = files.iter().any(|f| f.carried_over);
    let mut files = files.into_iter();
    loop {
        while running.len() < limits::FILES_AT_ONCE
            && let Some(file) = files.next()
        {
            running.spawn(one_file(context.clone(), Arc::new(file)));
        }
        match running.join_next().await {
            None => return Ok(carried_over),
            Some(Ok(result)) => result?,
            Some(Err(e)) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
            Some(Err(_)) => return Err(TaskFailure::canceled()),
        }
    }
}

/// Every file that has bytes, after the sources of all that miss blocks were looked at: a job that must fail
/// because of its last source fails before it has read the first.
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
            no_bytes(&file.path, &file.checksum)?;
            continue;
        }
        let location = Location::parse(source).map_err(|mut failure| {
            failure.message = format!("'{}': {}", file.path, failure.message);
            failure
        })?;
        let blocks = context.artifact.blocks().of_file(index);
        if matches!(file.checksum, Checksum::Opaque(_)) {
            // Nothing would tell whether what peers said of them is true.
            context.give_up(context.artifact.unproven(blocks.clone())).await?;
        }
        let held = blocks.clone().filter(|&b| context.artifact.has(b)).count();
        let carried_over = held > 0;
        if held < blocks.len() {
            allowed(context, &file.path, &location)?;
        }
        files.push(SourceFile {
            path: file.path.clone(),
            size_bytes: file.size_bytes,
            checksum: file.checksum.clone(),
            location,
            blocks,
            carried_over,
            writes: TaskTracker::new(),
        });
    }
    // One look per distinct source is enough for the list; sizes are compared per file.
    let mut seen = BTreeSet::new();
    for file in &files {
        if let Location::Path(path) = &file.location
            && !whole(context, file)
            && seen.insert((path, file.size_bytes))
        {
            local::look(context, file).await?;
        }
    }
    Ok(files)
}

/// An empty file has no source, but it may have a checksum.
fn no_bytes(path: &str, checksum: &Checksum) -> Result<(), TaskFailure> {
    match checksum {
        Checksum::Sha256(declared) if *declared != Digest::sha256(b"") => {
            let message = format!(
                "'{path}' is empty, but its declared checksum, sha256:{declared}, is not the one of an empty file \
                 (sha256:{}): correct the size or the checksum in the manifest",
                Digest::sha256(b"")
            );
            Err(TaskFailure::permanent("checksum_mismatch", message))
        }
        _ => Ok(()),
    }
}

/// A URL must be on the list. Paths are compared when they are opened, once they are resolved.
fn allowed(context: &Context, path: &str, location: &Location) -> Result<(), TaskFailure> {
    match location {
        Location::Url(url) if !context.allow.allows_url(url) => Err(context.allow.refusal(path, location)),
        _ => Ok(()),
    }
}

fn whole(context: &Context, file: &SourceFile) -> bool {
    file.blocks.clone().all(|b| context.artifact.has(b))
}

/// Transfers one file; once more, from its start, if what was there before it began proves wrong.
async fn one_file(context: Arc<Context>, file: Arc<SourceFile>) -> Result<(), TaskFailure> {
    match one_pass(&context, &file).await {
        Err(failure) if file.carried_over && failure.code == "checksum_mismatch" => {
            tracing::warn!(model = %context.artifact.model(), "{}", failure.message);
            allowed(&context, &file.path, &file.location)?;
            let anew = SourceFile {
                carried_over: false,
                writes: TaskTracker::new(),
                ..SourceFile::clone(&file)
            };
            one_pass(&context, &Arc::new(anew)).await
        }
        result => result,
    }
}

/// Transfers one file and, behind it, computes its checksum.
async fn one_pass(context: &Arc<Context>, file: &Arc<SourceFile>) -> Result<(), TaskFailure> {
    let fetched = CancellationToken::new();
    let fetch = async {
        match &file.location {
            Location::Path(_) => local::fetch(context, file).await?,
            Location::Url(url) => http::fetch(context, file, url).await?,
        }
        fetched.cancel();
        Ok(())
    };
    let result = tokio::try_join!(fetch, hash::check(context, file, &fetched)).map(drop);
    if let Err(failure) = &result
        && CONDEMNS_FILE.contains(&failure.code.as_str())
    {
        // At the latest the end of the acquisition forgets them: this task may be stopped while it waits.
        context.condemn(&file.blocks);
        quiet(&file.writes, &context.artifact, context.config.drain_timeout).await;
        context.forget_condemned(&file.blocks).await?;
    }
    result
}

/// Failures after which what was read of the file cannot be trusted to be one version of it.
const CONDEMNS_FILE: [&str; 3] = ["checksum_mismatch", "source_changed", "size_mismatch"];

/// Makes everything durable, then computes the seal.
async fn seal(
    context: &Arc<Context>,
    expected: Option<Seal>,
    carried_over: bool,
) -> Result<Seal, TaskFailure> {
    let artifact = context.artifact.clone();
    for (index, file) in artifact.manifest().files.iter().enumerate() {
        // A peer's block that landed while its file was read is no more proven than one from before.
        let unproven = artifact.unproven(artifact.blocks().of_file(index));
        if matches!(file.checksum, Checksum::Opaque(_)) && !unproven.is_empty() {
            context.give_up(unproven).await?;
            return Err(blocks_lost(&artifact));
        }
    }
    let seal = context
        .on_disk(move || {
            artifact.flush().map_err(|e| disk_failure(e.code(), &e))?;
            artifact.seal_if_whole().ok_or_else(|| blocks_lost(&artifact))
        })
        .await?;
    let mut result = compare(seal, expected);
    if let Err(failure) = &mut result {
        // What an earlier acquisition left may be of another version; the next one reads everything.
        failure.retryable = carried_over;
        // Which block differs is not known; a copy that cannot be published must not be resumed.
        let all = 0..context.artifact.blocks().len();
        context.condemn(&all);
        context.forget_condemned(&all).await?;
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
