//! Work that takes long enough to need a thread of its own, and memory enough to be bounded.

use super::error::ApiError;
use mooncake_proto::api::ProblemCode;
use tokio::sync::Semaphore;

/// Runs `work` on a thread for blocking work, with a permit of `room` that is held until the work has ended, also
/// where the caller goes away before: what runs at once stays bounded. Who waits for a permit is bounded by the
/// admission of requests.
pub(super) async fn at_most<T: Send + 'static>(
    room: &'static Semaphore,
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    let permit = room.acquire().await.expect("never closed");
    let done = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        work()
    });
    done.await
        .map_err(|e| ApiError::new(ProblemCode::Internal, format!("the {what} failed: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[tokio::test]
    async fn work_is_counted_until_it_ends_whoever_waits_for_it() {
        static ROOM: Semaphore = Semaphore::const_new(1);
        let (began, has_begun) = tokio::sync::oneshot::channel();
        let (end, ended) = mpsc::channel::<()>();
        let caller = tokio::spawn(at_most(&ROOM, "test", move || {
            let _ = began.send(());
            let _ = ended.recv();
        }));
        has_begun.await.unwrap();
        caller.abort();
        assert!(caller.await.unwrap_err().is_cancelled());
        assert_eq!(ROOM.available_permits(), 0, "the work goes on");
        drop(end);
        // Only now is there room for the next.
        assert_eq!(at_most(&ROOM, "test", || 7).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn a_panic_is_an_internal_error_and_gives_the_room_back() {
        static ROOM: Semaphore = Semaphore::const_new(1);
        let failed: Result<(), _> = at_most(&ROOM, "test", || panic!("on purpose")).await;
        let error = failed.unwrap_err();
        assert_eq!(error.problem().code, ProblemCode::Internal);
        assert_eq!(ROOM.available_permits(), 1);
    }
}
