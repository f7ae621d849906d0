//! The declared SHA-256 of a file, computed in file order behind whatever order the bytes arrive in.

use super::{
    context::{Context, SourceFile},
    limits,
};
use crate::task::TaskFailure;
use mooncake_proto::{
    digest::{Algorithm, Digest, Hasher},
    manifest::Checksum,
};
use std::{ops::Range, sync::Arc};
use tokio_util::sync::CancellationToken;

/// Returns once the whole file is held and its checksum, if one was declared, is right. Reads back what was
/// written (mostly from the page cache): what is checked is what peers and users get.
/// `fetched` tells that no more blocks of the file will come.
pub(super) async fn check(
    context: &Arc<Context>,
    file: &SourceFile,
    fetched: &CancellationToken,
) -> Result<(), TaskFailure> {
    let Checksum::Sha256(expected) = file.checksum else {
        return Ok(());
    };
    let mut progress = context.artifact.progress();
    let mut hasher = Algorithm::Sha256.hasher();
    let mut next = file.blocks.start;
    while next < file.blocks.end {
        let no_more = fetched.is_cancelled();
        progress.borrow_and_update();
        if context.artifact.has(next) {
            let permit = limits::hasher().await;
            (hasher, next) = step(context, file, hasher, next).await?;
            drop(permit);
        } else if no_more {
            return Err(super::blocks_lost(&context.artifact));
        } else {
            tokio::select! {
                changed = progress.changed() => if changed.is_err() {
                    let message = format!("the staging of {} was closed", context.artifact.model());
                    return Err(TaskFailure::retryable("staging_closed", message));
                },
                () = fetched.cancelled() => {}
            }
        }
    }
    let actual = hasher.finish();
    if actual == expected {
        Ok(())
    } else {
        Err(mismatch(file, expected, actual))
    }
}

/// Hashes the run of held blocks at `next`, at most [`limits::HASH_STEP_BYTES`].
async fn step(
    context: &Arc<Context>,
    file: &SourceFile,
    mut hasher: Hasher,
    next: u32,
) -> Result<(Hasher, u32), TaskFailure> {
    let (artifact, counters) = (context.artifact.clone(), context.counters.clone());
    let blocks: Range<u32> = next..file.blocks.end;
    let path = file.path.clone();
    context
        .on_disk(move || {
            let mut hashed = 0u64;
            let mut next = blocks.start;
            let mut scratch = vec![0; limits::HASH_PIECE_BYTES];
            while next < blocks.end && hashed < limits::HASH_STEP_BYTES && artifact.has(next) {
                artifact
                    .hash_block(next, &mut hasher, &mut scratch)
                    .map_err(|e| {
                        let message = format!(
                            "cannot read back block {next} of '{path}' from staging: {e}; check the disk"
                        );
                        TaskFailure::retryable("disk_error", message)
                    })?;
                let len = u64::from(artifact.blocks().locate(next).map_or(0, |r| r.len));
                // Block by block: on a slow disk this is all that shows that the attempt gets on.
                counters.add_checked(len);
                hashed += len;
                next += 1;
            }
            Ok((hasher, next))
        })
        .await
}

fn mismatch(file: &SourceFile, expected: Digest, actual: Digest) -> TaskFailure {
    let what = format!(
        "'{}' from {} does not have the declared checksum: expected sha256:{expected}, got sha256:{actual}; what was \
         read of it is discarded",
        file.path, file.location
    );
    if file.carried_over {
        // That part may be of another version of the source, or of another source altogether, or a peer's.
        let message = format!("{what}. A part was there before: it is read again from the start");
        TaskFailure::retryable("checksum_mismatch", message)
    } else {
        let message =
            format!("{what}. Correct the checksum in the manifest, or bring back the file it was made from");
        TaskFailure::permanent("checksum_mismatch", message)
    }
}
