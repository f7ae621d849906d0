//! Sources on the web.
//!
//! The first request asks for the first missing range. If the server honours it, the rest of the file is
//! fetched in ranges, several at once, each under the condition that the file is still the same version
//! (`If-Match`, else `If-Unmodified-Since`); after a cut the rest of a range is asked for from the last
//! block boundary. If the server answers with the whole file, that very answer is read from its start, as a
//! single stream; after a cut such a file begins anew, a bounded number of times.
//!
//! Redirects: at most ten; from https only to https; to other hosts (signed URLs of storage services are the
//! norm), but never from a public server to an address of this machine or of a private network, and never to a
//! link-local address; see [`scope`]. A place that the allow list names may always be redirected to.

mod body;
mod fetcher;
mod head;
mod retry;
mod scope;

use super::{
    context::{Context, SourceFile, Writing},
    limits,
};
use crate::task::TaskFailure;
use body::Body;
pub(super) use fetcher::Fetcher;
use fetcher::{Target, Trouble, protocol};
use futures_util::future::try_join_all;
use head::{ContentRange, Version, content_length};
use parking_lot::Mutex;
use reqwest::{
    Response, StatusCode,
    header::{CONTENT_ENCODING, HeaderMap, HeaderValue, RANGE, TRANSFER_ENCODING},
};
use retry::Retry;
use std::{collections::VecDeque, ops::Range, sync::Arc};
use tokio::sync::watch;
use url::Url;

/// Fetches what is missing of one file.
pub(super) async fn fetch(
    context: &Arc<Context>,
    file: &Arc<SourceFile>,
    url: &Url,
) -> Result<(), TaskFailure> {
    let mut queue = parts(context, file);
    let Some(first) = queue.pop_front() else {
        return Ok(());
    };
    let helpers = queue.len().min(limits::CONNECTIONS_PER_FILE - 1);
    let transfer = Transfer {
        context,
        file,
        fetcher: context.fetcher()?,
        target: Target::new(url.clone()),
        version: Mutex::default(),
        queue: Mutex::new(queue),
    };
    let (known, ranges) = watch::channel(false);
    let lead = transfer.lead(first, known);
    let help = try_join_all((0..helpers).map(|_| transfer.help(ranges.clone())));
    tokio::try_join!(lead, help).map(drop)
}

/// The runs of missing blocks, cut into requests.
fn parts(context: &Context, file: &SourceFile) -> VecDeque<Range<u32>> {
    let longest =
        (context.config.part_bytes / u64::from(context.artifact.blocks().block_size())).max(1) as u32;
    let mut parts: VecDeque<Range<u32>> = VecDeque::new();
    for block in file.blocks.clone().filter(|&b| !context.artifact.has(b)) {
        match parts.back_mut() {
            Some(part) if part.end == block && part.end - part.start < longest => part.end += 1,
            _ => parts.push_back(block..block + 1),
        }
    }
    parts
}

/// One file under way.
struct Transfer<'a> {
    context: &'a Arc<Context>,
    file: &'a Arc<SourceFile>,
    fetcher: &'a Fetcher,
    target: Target,
    /// Of the first answer; all others must be the same. A leaf lock.
    version: Mutex<Option<Version>>,
    /// What nobody has begun yet. A leaf lock.
    queue: Mutex<VecDeque<Range<u32>>>,
}

/// How a server answers a request for a range.
enum Ranged {
    /// With the range; it was read to its end.
    Done,
    /// With the whole file, of which nothing was read yet; or with a range that is of no use.
    Refused(Option<Response>),
}

impl Transfer<'_> {
    /// Finds out whether ranges are honoured, and goes on accordingly.
    async fn lead(&self, first: Range<u32>, known: watch::Sender<bool>) -> Result<(), TaskFailure> {
        match self.part(first, Some(&known)).await? {
            Ranged::Done => self.work().await,
            Ranged::Refused(answer) => {
                self.queue.lock().clear();
                self.whole(answer).await
            }
        }
    }

    /// Takes part once ranges are known to be honoured.
    async fn help(&self, mut ranges: watch::Receiver<bool>) -> Result<(), TaskFailure> {
        match ranges.wait_for(|honoured| *honoured).await {
            Ok(_) => {}
            // The leader reads the file by itself, or failed.
            Err(_) => return Ok(()),
        }
        self.work().await
    }

    async fn work(&self) -> Result<(), TaskFailure> {
        loop {
            let Some(part) = self.queue.lock().pop_front() else {
                return Ok(());
            };
            if let Ranged::Refused(_) = self.part(part, None).await? {
                unreachable!("only the first request may be refused");
            }
        }
    }

    /// Fetches a run of blocks, with retries. `known`: ranges are not known to be honoured yet.
    async fn part(
        &self,
        part: Range<u32>,
        known: Option<&watch::Sender<bool>>,
    ) -> Result<Ranged, TaskFailure> {
        let mut retry = Retry::new(self.file, &self.context.config);
        let mut next = part.start;
        loop {
            let before = next;
            let result = self.part_once(&mut next, part.end, known).await;
            if next > before {
                retry.progress();
            }
            match result {
                Ok(ranged) => return Ok(ranged),
                Err(Trouble::Final(failure)) => return Err(failure),
                Err(Trouble::Transient { why, retry_after }) => {
                    if let Some(pause) = retry_after {
                        self.fetcher.pause(self.file, pause)?;
                    }
                    tokio::time::sleep(retry.failed(&why)?).await;
                }
            }
        }
    }

    /// One request for blocks `next..end`; `next` moves with what was written.
    async fn part_once(
        &self,
        next: &mut u32,
        end: u32,
        known: Option<&watch::Sender<bool>>,
    ) -> Result<Ranged, Trouble> {
        let (first, last) = self.bytes(*next..end);
        let mut headers = HeaderMap::new();
        let range = format!("bytes={first}-{last}");
        headers.insert(RANGE, HeaderValue::from_str(&range).expect("digits"));
        if let Some((name, value)) = self.version.lock().as_ref().and_then(Version::condition) {
            headers.insert(name, value);
        }
        self.fetcher.turn().await;
        let _permit = self.context.connections.take().await;
        let answer = self.fetcher.get(self.file, &self.target, &headers).await?;
        let honoured = known.is_none_or(|k| *k.borrow());
        match answer.status() {
            StatusCode::PARTIAL_CONTENT => {}
            StatusCode::PRECONDITION_FAILED => {
                return Err(self
                    .file
                    .changed("the server says that this version is gone")
                    .into());
            }
            StatusCode::RANGE_NOT_SATISFIABLE => return Err(self.unsatisfiable(&answer, &range).into()),
            _ if honoured => {
                self.same_version(&answer)?;
                return Err(Trouble::transient(
                    "it answered a request for a range with the whole file",
                ));
            }
            _ => return Ok(Ranged::Refused(Some(answer))),
        }
        self.identity(&answer)?;
        let Some(content) = ContentRange::of(answer.headers()) else {
            return Err(protocol(
                self.file,
                "answers a request for a range without a valid Content-Range",
            )
            .into());
        };
        match content.total {
            Some(total) if total != self.file.size_bytes => {
                return Err(self.file.size_mismatch(format!("{total} bytes")).into());
            }
            // The size cannot be checked: one stream, read to its end, shows it.
            None if !honoured => return Ok(Ranged::Refused(None)),
            _ => {}
        }
        let length = last - first + 1;
        if content.range != Some((first, last))
            || content_length(answer.headers()).is_some_and(|l| l != length)
        {
            let got = answer.headers().get(reqwest::header::CONTENT_RANGE);
            let what = format!("answers a request for {range} with another range ({got:?})");
            return Err(protocol(self.file, what).into());
        }
        self.same_version(&answer)?;
        if let Some(known) = known {
            known.send_replace(true);
        }
        let mut body = Body::new(answer, self.context);
        let blocks = *next..end;
        self.read(&mut body, blocks, next, false).await?;
        Ok(Ranged::Done)
    }

    /// Reads the file as a single stream, beginning with `answer` if there is one.
    async fn whole(&self, mut answer: Option<Response>) -> Result<(), TaskFailure> {
        let mut retry = Retry::new(self.file, &self.context.config);
        let mut in_vain = 0;
        loop {
            let before = self.held();
            let (result, began) = match self.whole_answer(answer.take()).await {
                Ok((mut body, _permit)) => (self.whole_body(&mut body).await, true),
                Err(trouble) => (Err(trouble), false),
            };
            if self.held() > before {
                retry.progress();
                in_vain = 0;
            } else if began {
                in_vain += 1;
            }
            let (why, retry_after) = match result {
                Ok(()) => return Ok(()),
                Err(Trouble::Final(failure)) => return Err(failure),
                Err(Trouble::Transient { why, retry_after }) => (why, retry_after),
            };
            if in_vain >= limits::RESTARTS_WITHOUT_PROGRESS {
                return Err(TaskFailure::permanent(
                    "source_interrupted",
                    format!(
                        "{} (the source of '{}') was cut off {in_vain} times in a row without getting any further \
                         ({why}), and the server does not honour ranges, so that every try begins at the start: use \
                         a server that honours ranges, or copy the file to a folder of the seed node first",
                        self.file.location, self.file.path
                    ),
                ));
            }
            if let Some(pause) = retry_after {
                self.fetcher.pause(self.file, pause)?;
            }
            tokio::time::sleep(retry.failed(&why)?).await;
        }
    }

    async fn whole_answer(
        &self,
        answer: Option<Response>,
    ) -> Result<(Body, tokio::sync::OwnedSemaphorePermit), Trouble> {
        self.fetcher.turn().await;
        let permit = self.context.connections.take().await;
        let answer = match answer {
            Some(answer) => answer,
            None => {
                self.fetcher
                    .get(self.file, &self.target, &HeaderMap::new())
                    .await?
            }
        };
        if answer.status() != StatusCode::OK {
            return Err(protocol(self.file, format!("answers a plain GET with {}", answer.status())).into());
        }
        self.identity(&answer)?;
        match content_length(answer.headers()) {
            Some(length) if length != self.file.size_bytes => {
                return Err(self.file.size_mismatch(format!("{length} bytes")).into());
            }
            _ => {}
        }
        self.same_version(&answer)?;
        Ok((Body::new(answer, self.context), permit))
    }

    async fn whole_body(&self, body: &mut Body) -> Result<(), Trouble> {
        let held = |b: &u32| self.context.artifact.has(*b);
        let mut next = self.file.blocks.start;
        while let Some(missing) = (next..self.file.blocks.end).find(|b| !held(b)) {
            if missing > next {
                let (first, last) = self.bytes(next..missing);
                body.skip(last - first + 1)
                    .await
                    .map_err(|t| self.too_short(body, t))?;
            }
            let end = (missing..self.file.blocks.end)
                .find(held)
                .unwrap_or(self.file.blocks.end);
            let mut written = missing;
            self.read(body, missing..end, &mut written, true).await?;
            next = end;
        }
        Ok(())
    }

    /// Reads the blocks that `body` comes to next and writes them, one being written while the next arrives.
    /// `next` moves to the first one that is not written. The file's (or range's) last block is written only
    /// after the body has ended where it should.
    async fn read(
        &self,
        body: &mut Body,
        blocks: Range<u32>,
        next: &mut u32,
        whole: bool,
    ) -> Result<(), Trouble> {
        let mut writing: Option<Writing> = None;
        let mut trouble = None;
        for block in blocks.clone() {
            let len = self
                .context
                .artifact
                .blocks()
                .locate(block)
                .expect("a block of this file")
                .len as usize;
            let limit = self.context.config.no_progress_timeout;
            let Ok(mut buffer) = self.context.buffers.take(limit).await else {
                if let Some(earlier) = writing.take() {
                    earlier.done().await?;
                    *next = block;
                }
                trouble = Some(Trouble::transient(format!(
                    "no buffer of this node became free for {limit:?}: is its disk stuck?"
                )));
                break;
            };
            let mut read = body.fill(&mut buffer.bytes, len).await;
            let ends = if whole {
                block + 1 == self.file.blocks.end
            } else {
                block + 1 == blocks.end
            };
            if read.is_ok() && ends {
                read = body.end(self.file).await;
            }
            if let Some(earlier) = writing.take() {
                earlier.done().await?;
                *next = block;
            }
            if let Err(t) = read {
                // These bytes will have to come again.
                self.context.counters.add_refetched(buffer.bytes.len() as u64);
                trouble = Some(if whole { self.too_short(body, t) } else { t });
                break;
            }
            writing = Some(self.context.write(self.file, block, buffer));
        }
        if let Some(last) = writing {
            last.done().await?;
            *next = blocks.end;
        }
        trouble.map_or(Ok(()), Err)
    }

    /// A body in chunked encoding that ended properly, but early, was not cut: the file is shorter.
    fn too_short(&self, body: &Body, trouble: Trouble) -> Trouble {
        match trouble {
            Trouble::Transient { .. } if body.ended_properly() => self
                .file
                .size_mismatch(format!("only {} bytes", body.received()))
                .into(),
            other => other,
        }
    }

    /// First and last byte of a run of blocks.
    fn bytes(&self, blocks: Range<u32>) -> (u64, u64) {
        let map = self.context.artifact.blocks();
        let first = map.locate(blocks.start).expect("a block of this file");
        let last = map.locate(blocks.end - 1).expect("a block of this file");
        (first.offset, last.offset + u64::from(last.len) - 1)
    }

    fn held(&self) -> usize {
        self.file
            .blocks
            .clone()
            .filter(|&b| self.context.artifact.has(b))
            .count()
    }

    /// Remembers the first answer's version; refuses another one.
    fn same_version(&self, answer: &Response) -> Result<(), TaskFailure> {
        let version = Version::of(answer.headers());
        let mut pinned = self.version.lock();
        match pinned.as_ref().and_then(|first| first.changed(&version)) {
            Some(how) => Err(self.file.changed(how)),
            None => {
                pinned.get_or_insert(version);
                Ok(())
            }
        }
    }

    /// Bytes in another encoding are not the file's.
    fn identity(&self, answer: &Response) -> Result<(), TaskFailure> {
        match answer.headers().get(CONTENT_ENCODING) {
            Some(encoding) if encoding != "identity" => {
                let what =
                    format!("sends the file with Content-Encoding {encoding:?} although none was accepted");
                Err(protocol(self.file, what))
            }
            _ => Ok(()),
        }
    }

    fn unsatisfiable(&self, answer: &Response, range: &str) -> TaskFailure {
        match ContentRange::of(answer.headers()).and_then(|c| c.total) {
            Some(total) if total != self.file.size_bytes => self.file.size_mismatch(format!("{total} bytes")),
            _ => protocol(
                self.file,
                format!("answers 416 to a request for {range}, which lies inside the file"),
            ),
        }
    }
}

/// Whether the transfer encoding itself marks the end of the body.
fn marks_its_end(headers: &HeaderMap) -> bool {
    let chunked = |v: &HeaderValue| v.as_bytes().to_ascii_lowercase().ends_with(b"chunked");
    headers.get_all(TRANSFER_ENCODING).iter().any(chunked)
}
