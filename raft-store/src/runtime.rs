//! tokio for openraft, with one difference: a call to another node gets time to come back.
//!
//! openraft gives a vote as long as the shortest election time-out and a heartbeat as long as the interval between two,
//! and drops the call then, whatever the network makes of it. So the timers, which say how soon a silent leader is
//! replaced, would also say how far apart nodes may be: with a heartbeat every 40 ms, a leader whose answers take
//! 41 ms would never hear that it has a quorum. It would lead on, since its heartbeats arrive, and confirm nothing. An
//! answer that comes late is worth as much as one that comes early: openraft counts it from when the call was sent, and
//! drops it if it belongs to another term.
//!
//! Guaranteed: openraft waits for an answer at least [`CALL_TIMEOUT`]. Its own timers (ticks, elections, leases,
//! deadlines of readers) do not go through [`AsyncRuntime::timeout`] and are as configured.

use std::future::Future;
use std::time::Duration;

use openraft::{AsyncRuntime, OptionalSend, TokioRuntime};

/// The least that a call may take. Several round trips around the world; a network that is done earlier ends its calls
/// itself.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(1);

/// See the module docs.
#[derive(Debug)]
pub struct Runtime(TokioRuntime);

impl AsyncRuntime for Runtime {
    type JoinError = <TokioRuntime as AsyncRuntime>::JoinError;
    type JoinHandle<T: OptionalSend + 'static> = <TokioRuntime as AsyncRuntime>::JoinHandle<T>;
    type Sleep = <TokioRuntime as AsyncRuntime>::Sleep;
    type Instant = <TokioRuntime as AsyncRuntime>::Instant;
    type TimeoutError = <TokioRuntime as AsyncRuntime>::TimeoutError;
    type Timeout<R, T: Future<Output = R> + OptionalSend> = <TokioRuntime as AsyncRuntime>::Timeout<R, T>;
    type ThreadLocalRng = <TokioRuntime as AsyncRuntime>::ThreadLocalRng;

    fn spawn<T>(future: T) -> Self::JoinHandle<T::Output>
    where
        T: Future + OptionalSend + 'static,
        T::Output: OptionalSend + 'static,
    {
        TokioRuntime::spawn(future)
    }

    fn sleep(duration: Duration) -> Self::Sleep {
        TokioRuntime::sleep(duration)
    }

    fn sleep_until(deadline: Self::Instant) -> Self::Sleep {
        TokioRuntime::sleep_until(deadline)
    }

    fn timeout<R, F: Future<Output = R> + OptionalSend>(
        duration: Duration,
        future: F,
    ) -> Self::Timeout<R, F> {
        TokioRuntime::timeout(duration.max(CALL_TIMEOUT), future)
    }

    fn timeout_at<R, F: Future<Output = R> + OptionalSend>(
        deadline: Self::Instant,
        future: F,
    ) -> Self::Timeout<R, F> {
        TokioRuntime::timeout_at(deadline, future)
    }

    fn is_panic(join_error: &Self::JoinError) -> bool {
        TokioRuntime::is_panic(join_error)
    }

    fn thread_rng() -> Self::ThreadLocalRng {
        TokioRuntime::thread_rng()
    }

    type Mpsc = <TokioRuntime as AsyncRuntime>::Mpsc;
    type Watch = <TokioRuntime as AsyncRuntime>::Watch;
    type Oneshot = <TokioRuntime as AsyncRuntime>::Oneshot;
    type Mutex<T: OptionalSend + 'static> = <TokioRuntime as AsyncRuntime>::Mutex<T>;

    fn new(threads: usize) -> Self {
        Self(TokioRuntime::new(threads))
    }

    fn block_on<F, T>(&mut self, future: F) -> T
    where
        F: Future<Output = T>,
    {
        self.0.block_on(future)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_call_that_takes_longer_than_openraft_gives_it_is_answered() {
        let answer = |after| async move {
            tokio::time::sleep(after).await;
            "granted"
        };
        let heartbeat = Duration::from_millis(40);
        let late = Runtime::timeout(heartbeat, answer(CALL_TIMEOUT / 2)).await;
        assert_eq!(late.ok(), Some("granted"));
        assert!(
            Runtime::timeout(heartbeat, answer(CALL_TIMEOUT * 2))
                .await
                .is_err()
        );
        // What may take longer still may.
        let snapshot = CALL_TIMEOUT * 10;
        let late = Runtime::timeout(snapshot, answer(CALL_TIMEOUT * 9)).await;
        assert_eq!(late.ok(), Some("granted"));
    }
}
