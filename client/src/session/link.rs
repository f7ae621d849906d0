//! One connection to one master, from the dial to its end.

use super::{
    blobs::Blobs,
    dialer::Ended,
    pump::{Facts, pump},
};
use crate::{
    executor::{Executor, Order, OrderError},
    store::EpochError,
};
use futures_util::Stream;
use mooncake_proto::{
    MAX_SESSION_FRAME_BYTES,
    hello::{self, HelloConfig, HelloError, Purpose},
    pb::session::{
        self as pb, master_frame::Body as MasterBody, node_frame::Body as NodeBody,
        node_session_client::NodeSessionClient,
    },
};
use std::{
    error::Error,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    sync::{Semaphore, mpsc},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

/// For TCP, the hello and the opening of the stream. A frozen master's kernel still accepts connections: this
/// is what it costs to find out.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);
/// For the answer to the registration: it waits for a commit, and up to 10 s for a former owner of the node id
/// who may only be late, before the master says that the id is taken.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(12);
/// Frames that wait for the connection: at most a few MiB, and a slow master slows the pump, not the node.
const OUTBOUND_FRAMES: usize = 8;
/// Heartbeat intervals without any frame from the master after which it is taken for dead.
const SILENT_INTERVALS: u32 = 3;
/// Below this, a busy machine's scheduling looks like death.
const LEAST_SILENCE: Duration = Duration::from_secs(1);
/// What a master may ask for as heartbeat interval.
const HEARTBEAT_INTERVAL_RANGE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(30));
/// Where the master names none.
const DEFAULT_HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);
/// For what a registration says of the store, which may wait for a disk. It does not go without the fence; of the
/// space it says what was known last.
const FACTS_TIMEOUT: Duration = Duration::from_secs(2);
/// For a goodbye to leave.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(1);
/// Room for the framing around the largest frame.
const FRAME_SLACK_BYTES: usize = 64 << 10;

/// What does not change between connections.
pub(super) struct Fixed {
    pub(super) hello: Arc<HelloConfig>,
    /// The registration, but for what is true at the moment.
    pub(super) register: pb::Register,
    pub(super) facts: Facts,
    pub(super) executor: Executor,
    /// Sampled elsewhere: asking a disk may block.
    pub(super) free_bytes: Arc<AtomicU64>,
    /// As the disk said it last.
    pub(super) capacity_bytes: Arc<AtomicU64>,
    /// Questions to the disk: one of each kind at a time, so that a disk that hangs does not take the threads that
    /// look up the masters' names.
    pub(super) space_turn: Arc<Semaphore>,
    pub(super) fence_turn: Arc<Semaphore>,
    pub(super) round_trips: super::RoundTrips,
    /// Where the pump runs.
    pub(super) main: tokio::runtime::Handle,
    pub(super) stop: CancellationToken,
}

/// How it ended, for the dialer and for a person.
#[derive(Clone, Debug)]
pub(super) enum LinkEnd {
    /// This process stops; the goodbye is sent.
    Stopped,
    /// The dialer's case, and what to log.
    Ended(Ended, String),
    /// The master refuses this node.
    Refused { code: String, message: String },
}

fn unreachable(why: impl ToString) -> LinkEnd {
    LinkEnd::Ended(Ended::Unreachable, why.to_string())
}

/// One connection. `registered` is called with the welcome.
pub(super) async fn run(
    fixed: &Fixed,
    address: &str,
    blobs: &mut Blobs,
    registered: impl FnOnce(&pb::Welcome),
) -> LinkEnd {
    let (data, data_rx) = mpsc::channel(OUTBOUND_FRAMES);
    let (beats, beats_rx) = mpsc::channel(1);
    let outbound = Outbound {
        beats: beats_rx,
        data: data_rx,
        beats_end: false,
    };

    let register = tokio::select! {
        () = fixed.stop.cancelled() => return LinkEnd::Stopped,
        register = fixed.register_now() => register,
    };
    let Some(register) = register else {
        return unreachable(format!(
            "this node's own store did not answer within {} s: is its disk stuck?",
            FACTS_TIMEOUT.as_secs()
        ));
    };
    if data.send(node_frame(NodeBody::Register(register))).await.is_err() {
        return unreachable("the stream ended before it began");
    }
    let channel = hello::channel(address, fixed.hello.clone(), Purpose::Session);
    let mut client = NodeSessionClient::new(channel)
        .max_decoding_message_size(MAX_SESSION_FRAME_BYTES + FRAME_SLACK_BYTES);
    let opened = tokio::select! {
        () = fixed.stop.cancelled() => return LinkEnd::Stopped,
        opened = tokio::time::timeout(OPEN_TIMEOUT, client.open(outbound)) => opened,
    };
    let mut inbound = match opened {
        Ok(Ok(response)) => response.into_inner(),
        Ok(Err(status)) => return open_failure(&status),
        Err(_) => return unreachable(format!("no answer within {} s", OPEN_TIMEOUT.as_secs())),
    };
    let first = tokio::select! {
        () = fixed.stop.cancelled() => return LinkEnd::Stopped,
        first = tokio::time::timeout(WELCOME_TIMEOUT, inbound.message()) => first,
    };
    let welcome = match first {
        Err(_) => {
            return unreachable(format!(
                "no answer to the registration within {} s",
                WELCOME_TIMEOUT.as_secs()
            ));
        }
        Ok(Err(status)) => return open_failure(&status),
        Ok(Ok(None)) => return unreachable("the master closed the session without an answer"),
        Ok(Ok(Some(frame))) => match frame.body {
            Some(MasterBody::Welcome(welcome)) => welcome,
            Some(MasterBody::Redirect(r)) => return redirected(r),
            Some(MasterBody::Refused(r)) => {
                return LinkEnd::Refused {
                    code: r.code,
                    message: r.message,
                };
            }
            _ => {
                return unreachable(
                    "the master's first frame is neither a welcome nor a redirect: is it a newer version?",
                );
            }
        },
    };
    let (store, epoch) = (fixed.facts.store.clone(), welcome.recovery_epoch);
    match ask(&fixed.fence_turn, FACTS_TIMEOUT, move || store.enter_epoch(epoch)).await {
        Some(Ok(())) => {}
        Some(Err(why @ EpochError::Old { .. })) => {
            return LinkEnd::Ended(Ended::Refused, why.to_string());
        }
        Some(Err(why)) => {
            return unreachable(format!(
                "this node cannot note its master's recovery epoch: {why}"
            ));
        }
        None => {
            return unreachable(format!(
                "this node's own store did not note its master's recovery epoch within {} s: is its disk stuck?",
                FACTS_TIMEOUT.as_secs()
            ));
        }
    }
    registered(&welcome);
    let interval = match welcome.heartbeat_interval_ms {
        0 => DEFAULT_HEARTBEAT_INTERVAL,
        ms => Duration::from_millis(ms.into()).clamp(HEARTBEAT_INTERVAL_RANGE.0, HEARTBEAT_INTERVAL_RANGE.1),
    };

    blobs.restart();
    fixed.round_trips.restart();
    let (free_bytes, round_trips) = (fixed.free_bytes.clone(), fixed.round_trips.clone());
    let _heart = AbortOnDrop(tokio::spawn(heart(beats, interval, free_bytes, round_trips)));
    let mut pump = AbortOnDrop(fixed.main.spawn(pump(fixed.facts.clone(), data.clone())));
    let silence = (interval * SILENT_INTERVALS).max(LEAST_SILENCE);
    let mut deadline = Instant::now() + silence;
    loop {
        let message = tokio::select! {
            biased;
            () = fixed.stop.cancelled() => {
                drop(pump);
                goodbye(data, &mut inbound).await;
                return LinkEnd::Stopped;
            }
            message = inbound.message() => message,
            // With the stream, which `inbound` will say too, or by a fault: without it the master would hear
            // nothing any more but heartbeats.
            ended = &mut pump.0 => {
                return lost(match ended {
                    Ok(()) => "the stream to the master closed".into(),
                    Err(e) => format!("a fault in mooncake_client ended this node's reports ({e}); please report it"),
                });
            }
            () = tokio::time::sleep_until(deadline) => {
                return lost(format!("the master was silent for {} ms", silence.as_millis()));
            }
        };
        let frame = match message {
            Ok(Some(frame)) => frame,
            Ok(None) => return lost("the master closed the session".into()),
            Err(status) => return lost(format!("the connection broke: {}", describe(&status))),
        };
        deadline = Instant::now() + silence;
        match frame.body {
            Some(MasterBody::BlobPart(part)) => {
                if let Err(e) = blobs.add(part) {
                    return confused(&e.to_string());
                }
            }
            Some(MasterBody::Order(order)) => {
                if let Err(e) = take_order(fixed, blobs, order) {
                    return confused(&e);
                }
            }
            // The leader changed.
            Some(MasterBody::Redirect(r)) => return redirected(r),
            Some(MasterBody::Refused(r)) => {
                return LinkEnd::Refused {
                    code: r.code,
                    message: r.message,
                };
            }
            Some(MasterBody::Heartbeat(beat)) => {
                if beat.answers != 0 {
                    fixed
                        .round_trips
                        .answered(beat.answers, std::time::Instant::now());
                }
            }
            Some(MasterBody::Welcome(_)) => {}
            // Of a newer master; what it is about, it finds out from the reports.
            None => tracing::debug!("a frame that this version does not know"),
        }
    }
}

/// `Err`: the session must start anew, so that the master sends everything again.
fn take_order(fixed: &Fixed, blobs: &mut Blobs, order: pb::Order) -> Result<(), String> {
    let model = order.model.clone().map(mooncake_proto::ids::ModelRef::from);
    match &order.body {
        Some(pb::order::Body::Acquire(a)) => {
            blobs.touch(&a.manifest_digest);
            blobs.touch(&a.sources_digest);
        }
        Some(pb::order::Body::Replicate(r)) => blobs.touch(&r.manifest_digest),
        _ => {}
    }
    match Order::from_wire(order, |digest| blobs.get(digest)) {
        Ok(order) => {
            fixed.executor.submit(order);
            Ok(())
        }
        Err(e @ OrderError::MissingBlob) => {
            let model = model.map(|m| m.to_string()).unwrap_or_default();
            Err(format!("an order for {model} cannot be read: {e}"))
        }
        Err(e @ OrderError::Malformed(_)) => {
            // Another session would bring the same again.
            let model = model.map(|m| m.to_string()).unwrap_or_default();
            tracing::error!(%model, "ignored an order that cannot be read: {e}; are the masters a newer version?");
            Ok(())
        }
    }
}

fn lost(why: String) -> LinkEnd {
    LinkEnd::Ended(Ended::Lost, why)
}

/// Not `Lost`: the next dial must not come without a pause.
fn confused(why: &str) -> LinkEnd {
    LinkEnd::Ended(
        Ended::Unreachable,
        format!("the master's frames make no sense: {why}"),
    )
}

fn redirected(r: pb::Redirect) -> LinkEnd {
    if r.leader_address.is_empty() {
        return LinkEnd::Ended(Ended::NoLeader, "the master knows no leader yet".into());
    }
    match mooncake_proto::ids::NodeId::parse(&r.leader_address) {
        Ok(_) => LinkEnd::Ended(
            Ended::Redirected(r.leader_address.clone()),
            format!("the leader is {}", r.leader_address),
        ),
        Err(e) => unreachable(format!("the master names a leader that cannot be dialled: {e}")),
    }
}

fn open_failure(status: &tonic::Status) -> LinkEnd {
    if let Some((code, message)) = refusal(status) {
        return LinkEnd::Refused { code, message };
    }
    unreachable(describe(status))
}

/// The refusal of a hello, somewhere in the chain of causes.
fn refusal(error: &(dyn Error + 'static)) -> Option<(String, String)> {
    let mut next = Some(error);
    while let Some(error) = next {
        let hello = error.downcast_ref::<HelloError>().or_else(|| {
            // An `io::Error` does not name the error it carries as its source.
            error
                .downcast_ref::<io::Error>()?
                .get_ref()?
                .downcast_ref::<HelloError>()
        });
        if let Some(HelloError::Refused { code, message }) = hello {
            return Some((code.clone(), message.clone()));
        }
        next = error.source();
    }
    None
}

/// The innermost cause says what happened ("Connection refused"); the outer ones only who noticed.
fn describe(status: &tonic::Status) -> String {
    let mut last: &dyn Error = status;
    while let Some(source) = last.source() {
        last = source;
    }
    let text = last.to_string();
    if text.is_empty() { status.to_string() } else { text }
}

async fn heart(
    beats: mpsc::Sender<pb::NodeFrame>,
    interval: Duration,
    free_bytes: Arc<AtomicU64>,
    round_trips: super::RoundTrips,
) {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for sequence in 1.. {
        ticks.tick().await;
        let beat = pb::Heartbeat {
            sequence,
            free_bytes: free_bytes.load(Ordering::Relaxed),
            answers: 0,
        };
        let at = std::time::Instant::now();
        match beats.try_send(node_frame(NodeBody::Heartbeat(beat))) {
            Ok(()) => round_trips.sent(sequence, at),
            // One that waits is as good as two.
            Err(mpsc::error::TrySendError::Full(_)) => {}
            Err(mpsc::error::TrySendError::Closed(_)) => return,
        }
    }
}

async fn goodbye(data: mpsc::Sender<pb::NodeFrame>, inbound: &mut tonic::Streaming<pb::MasterFrame>) {
    let farewell = async {
        let bye = pb::Goodbye {
            reason: "the process stops".into(),
        };
        let _ = data.send(node_frame(NodeBody::Goodbye(bye))).await;
        drop(data);
        // The master closes its half when it has read ours.
        while let Ok(Some(_)) = inbound.message().await {}
    };
    let _ = tokio::time::timeout(GOODBYE_TIMEOUT, farewell).await;
}

fn node_frame(body: NodeBody) -> pb::NodeFrame {
    pb::NodeFrame { body: Some(body) }
}

impl Fixed {
    async fn register_now(&self) -> Option<pb::Register> {
        let (store, free, capacity) = (
            self.facts.store.clone(),
            self.free_bytes.clone(),
            self.capacity_bytes.clone(),
        );
        let space = ask(&self.space_turn, FACTS_TIMEOUT, move || {
            if let Ok(bytes) = store.free_bytes() {
                free.store(bytes, Ordering::Relaxed);
            }
            if let Ok(bytes) = store.capacity_bytes() {
                capacity.store(bytes, Ordering::Relaxed);
            }
        });
        let store = self.facts.store.clone();
        let fence = ask(&self.fence_turn, FACTS_TIMEOUT, move || store.highest_fence());
        let (_, highest_fence) = tokio::join!(space, fence);
        Some(pb::Register {
            capacity_bytes: self.capacity_bytes.load(Ordering::Relaxed),
            free_bytes: self.free_bytes.load(Ordering::Relaxed),
            highest_fence: Some(highest_fence?.into()),
            ..self.register.clone()
        })
    }
}

/// Asks what may hang, in turn; `None` if there is no answer in time. The question stays under way then, and keeps
/// its turn.
async fn ask<T: Send + 'static>(
    turn: &Arc<Semaphore>,
    patience: Duration,
    question: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let answer = async {
        let turn = turn.clone().acquire_owned().await.ok()?;
        let asked = tokio::task::spawn_blocking(move || {
            let answer = question();
            drop(turn);
            answer
        });
        asked.await.ok()
    };
    tokio::time::timeout(patience, answer).await.ok().flatten()
}

/// Ends a task with the connection it belongs to.
struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Heartbeats first, then everything else. Ends with the data; heartbeats alone do not keep it open.
struct Outbound {
    beats: mpsc::Receiver<pb::NodeFrame>,
    data: mpsc::Receiver<pb::NodeFrame>,
    beats_end: bool,
}

impl Stream for Outbound {
    type Item = pb::NodeFrame;
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<pb::NodeFrame>> {
        if !self.beats_end {
            match self.beats.poll_recv(cx) {
                Poll::Ready(Some(beat)) => return Poll::Ready(Some(beat)),
                Poll::Ready(None) => self.beats_end = true,
                Poll::Pending => {}
            }
        }
        self.data.poll_recv(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt;

    #[tokio::test]
    async fn heartbeats_overtake_and_the_data_ends_the_stream() {
        let (data, data_rx) = mpsc::channel(8);
        let (beats, beats_rx) = mpsc::channel(1);
        let mut stream = Outbound {
            beats: beats_rx,
            data: data_rx,
            beats_end: false,
        };
        let holdings = node_frame(NodeBody::Holdings(pb::Holdings::default()));
        let beat = node_frame(NodeBody::Heartbeat(pb::Heartbeat::default()));
        data.send(holdings.clone()).await.unwrap();
        data.send(holdings.clone()).await.unwrap();
        beats.send(beat.clone()).await.unwrap();
        assert_eq!(stream.next().await, Some(beat.clone()));
        assert_eq!(stream.next().await, Some(holdings.clone()));
        beats.send(beat.clone()).await.unwrap();
        drop(data);
        assert_eq!(stream.next().await, Some(beat));
        assert_eq!(stream.next().await, Some(holdings));
        assert_eq!(stream.next().await, None);
    }

    #[tokio::test]
    async fn a_question_that_hangs_takes_one_thread_and_no_time() {
        let turn = Arc::new(Semaphore::new(1));
        let (answer, hangs) = std::sync::mpsc::channel::<u32>();
        let short = Duration::from_millis(20);
        assert_eq!(ask(&turn, short, move || hangs.recv().unwrap()).await, None);
        let asked = Arc::new(AtomicU64::new(0));
        let second = asked.clone();
        let question = move || second.fetch_add(1, Ordering::Relaxed);
        assert_eq!(ask(&turn, short, question).await, None, "the first has the turn");
        assert_eq!(asked.load(Ordering::Relaxed), 0, "it was not even begun");
        answer.send(1).unwrap();
        assert_eq!(ask(&turn, Duration::from_secs(60), || 7).await, Some(7));
    }

    #[test]
    fn a_refusal_is_found_under_its_wrappers() {
        let hello = HelloError::Refused {
            code: "wrong_secret".into(),
            message: "m".into(),
        };
        let status = tonic::Status::from_error(Box::new(io::Error::from(hello)));
        assert_eq!(refusal(&status), Some(("wrong_secret".into(), "m".into())));
        let other = tonic::Status::from_error(Box::new(io::Error::from(io::ErrorKind::ConnectionRefused)));
        assert_eq!(refusal(&other), None);
    }
}
