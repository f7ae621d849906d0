//! The body of an answer, read in pieces of known length, never further than wanted.

use super::{fetcher::Trouble, marks_its_end};
use crate::{
    rate::Rate,
    source::context::{Context, SourceFile},
    task::TransferCounters,
};
use bytes::{Buf, Bytes};
use mooncake_proto::text::chain;
use reqwest::Response;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

pub(super) struct Body {
    answer: Response,
    /// Received, not yet taken.
    rest: Bytes,
    received: u64,
    marks_its_end: bool,
    ended: bool,
    no_progress_timeout: Duration,
    floor_bytes: u64,
    /// Waited for since the floor was reached last, and what came meanwhile.
    waited: Duration,
    meanwhile_bytes: u64,
    counters: Arc<TransferCounters>,
    download: Arc<Rate>,
}

impl Body {
    pub(super) fn new(answer: Response, context: &Context) -> Self {
        Self {
            marks_its_end: marks_its_end(answer.headers()),
            answer,
            rest: Bytes::new(),
            received: 0,
            ended: false,
            no_progress_timeout: context.config.no_progress_timeout,
            floor_bytes: context.config.floor_bytes,
            waited: Duration::ZERO,
            meanwhile_bytes: 0,
            counters: context.counters.clone(),
            download: context.config.download.clone(),
        }
    }

    /// Bytes received so far.
    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Whether the server itself said that there is no more.
    pub(super) fn ended_properly(&self) -> bool {
        self.ended && self.marks_its_end
    }

    /// The next bytes; none at the end. `rest` is empty before.
    async fn next(&mut self) -> Result<bool, Trouble> {
        loop {
            // What this node does between two pieces is not the source's time.
            let left = self.no_progress_timeout.saturating_sub(self.waited);
            let began = Instant::now();
            let piece = tokio::time::timeout(left, self.answer.chunk()).await;
            self.waited += began.elapsed();
            let chunk = match piece {
                Ok(Ok(Some(chunk))) => chunk,
                Ok(Ok(None)) => {
                    self.ended = true;
                    return Ok(false);
                }
                Ok(Err(e)) => {
                    let why = chain(&e.without_url());
                    return Err(Trouble::transient(format!(
                        "cut off after {} bytes: {why}",
                        self.received
                    )));
                }
                Err(_) => {
                    let (limit, received) = (self.no_progress_timeout, self.received);
                    let why = match self.meanwhile_bytes {
                        0 => format!("no byte arrived for {limit:?}, after {received} bytes"),
                        n => format!(
                            "only {n} bytes arrived in {limit:?}, after {received} bytes: the source is too slow"
                        ),
                    };
                    return Err(Trouble::transient(why));
                }
            };
            if !chunk.is_empty() {
                let len = chunk.len() as u64;
                self.received += len;
                self.meanwhile_bytes += len;
                if self.meanwhile_bytes >= self.floor_bytes {
                    (self.waited, self.meanwhile_bytes) = (Duration::ZERO, 0);
                }
                self.counters.add_fetched(len);
                // It is here already; the next piece comes later for it.
                self.download.wait(len).await;
                self.rest = chunk;
                return Ok(true);
            }
        }
    }

    async fn more(&mut self) -> Result<(), Trouble> {
        if !self.rest.is_empty() || self.next().await? {
            return Ok(());
        }
        Err(Trouble::transient(format!(
            "the answer ended early, after {} bytes",
            self.received
        )))
    }

    /// Appends bytes until `buffer` holds `len`.
    pub(super) async fn fill(&mut self, buffer: &mut Vec<u8>, len: usize) -> Result<(), Trouble> {
        while buffer.len() < len {
            self.more().await?;
            let take = self.rest.len().min(len - buffer.len());
            buffer.extend_from_slice(&self.rest[..take]);
            self.rest.advance(take);
        }
        Ok(())
    }

    /// Passes over bytes that are held already.
    pub(super) async fn skip(&mut self, mut len: u64) -> Result<(), Trouble> {
        while len > 0 {
            self.more().await?;
            let take = (self.rest.len() as u64).min(len);
            self.rest.advance(take as usize);
            self.counters.add_refetched(take);
            len -= take;
        }
        Ok(())
    }

    /// Everything wanted was taken: there must be nothing more.
    pub(super) async fn end(&mut self, file: &SourceFile) -> Result<(), Trouble> {
        if self.rest.is_empty() && !self.next().await? {
            return Ok(());
        }
        Err(file.size_mismatch("more bytes").into())
    }
}
