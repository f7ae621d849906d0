//! Who waits for which job.

use mooncake_proto::ids::JobId;
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc};
use tokio::sync::Notify;

/// Long polls by job. An entry lives as long as someone waits.
#[derive(Default)]
pub(crate) struct JobWaiters {
    /// Taken by the applier's observer for each changed job and by each poll twice; never across an await.
    jobs: Mutex<HashMap<JobId, Arc<Notify>>>,
}

/// A registration: create it *before* looking at the job, so that no change falls between.
pub(crate) struct Waiting<'a> {
    all: &'a JobWaiters,
    job: JobId,
    notify: Arc<Notify>,
}

impl JobWaiters {
    pub(crate) fn register(&self, job: &JobId) -> Waiting<'_> {
        let notify = self.jobs.lock().entry(job.clone()).or_default().clone();
        Waiting {
            all: self,
            job: job.clone(),
            notify,
        }
    }

    pub(crate) fn wake(&self, job: &JobId) {
        if let Some(notify) = self.jobs.lock().get(job) {
            notify.notify_waiters();
        }
    }

    pub(crate) fn wake_all(&self) {
        self.jobs
            .lock()
            .values()
            .for_each(|notify| notify.notify_waiters());
    }
}

impl Waiting<'_> {
    /// Resolves at the first change after the returned future was enabled.
    pub(crate) fn notified(&self) -> tokio::sync::futures::Notified<'_> {
        self.notify.notified()
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut jobs = self.all.jobs.lock();
        // The map's and this registration's: nobody else waits.
        if Arc::strong_count(&self.notify) == 2 {
            jobs.remove(&self.job);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    #[tokio::test]
    async fn a_change_after_enabling_is_seen_and_entries_go() {
        let waiters = JobWaiters::default();
        let job = JobId::parse("a").unwrap();
        let one = waiters.register(&job);
        let two = waiters.register(&job);
        {
            let mut first = pin!(one.notified());
            first.as_mut().enable();
            waiters.wake(&job);
            first.await;
        }
        drop(two);
        assert_eq!(waiters.jobs.lock().len(), 1);
        drop(one);
        assert!(waiters.jobs.lock().is_empty());
    }
}
