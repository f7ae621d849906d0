//! The pure [`State`] behind the Raft store's [`StateMachine`].
//!
//! Guaranteed: every master applies the same commands in the same order and nothing else. An entry that this
//! program cannot decode ends the process: skipping it would make its state differ from the others'. So does a cluster
//! version above what this program supports. Both are said by [`Machine::too_old`]: starting this program again would
//! change nothing.

use std::sync::{Arc, OnceLock};

use mooncake_proto::codec;
use mooncake_proto::ids::JobId;
use mooncake_raft_store::{LogId, StateMachine};
use mooncake_state::{Command, Reply, State};
use tokio::sync::broadcast;

use super::version;

/// Version byte of a reply. It never leaves the process that applied the entry.
const REPLY_VERSION: u8 = 1;
/// Changes that a slow listener may be behind before it is told to look at everything again.
const CHANGE_QUEUE: usize = 4096;

/// What the last entries changed visibly.
#[derive(Clone, Debug)]
pub enum Change {
    /// These jobs. Sent under the state's write lock: whoever reads the state afterwards sees the change.
    Jobs(Arc<[JobId]>),
    /// A snapshot replaced the whole state: everything may have changed.
    Everything,
}

/// The replicated state, as the Raft store drives it.
#[derive(Debug)]
pub struct Machine {
    state: State,
    changes: broadcast::Sender<Change>,
    too_old: OnceLock<Arc<str>>,
}

impl Machine {
    /// An empty state, and where its changes are announced.
    pub(crate) fn new() -> (Self, broadcast::Sender<Change>) {
        let (changes, _) = broadcast::channel(CHANGE_QUEUE);
        let state = State::new();
        #[cfg(feature = "sabotage")]
        let state = {
            let mut state = state;
            state.break_fence = mooncake_raft_store::sabotage::is_broken("skip_fence");
            state
        };
        (
            Self {
                state,
                changes: changes.clone(),
                too_old: OnceLock::new(),
            },
            changes,
        )
    }

    /// The state.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Why this program cannot go on with this log, if that is so.
    pub fn too_old(&self) -> Option<&Arc<str>> {
        self.too_old.get()
    }

    fn give_up(&self, why: String) -> String {
        self.too_old.get_or_init(|| why.as_str().into());
        why
    }
}

/// Reads the answer that [`Machine`] gave to a command.
pub(crate) fn decode_reply(bytes: &[u8]) -> Result<Reply, codec::CodecError> {
    codec::decode(REPLY_VERSION, bytes)
}

impl StateMachine for Machine {
    type Image = State;

    fn apply(&mut self, log_id: LogId, command: &[u8]) -> Result<Vec<u8>, String> {
        let index = log_id.index();
        // The record's checksum held, so these are the bytes that were proposed.
        let command = Command::decode(command).map_err(|error| {
            self.give_up(format!(
                "log entry {log_id} cannot be read by this program ({error}): it was written by a newer version; \
                 start that version on this master"
            ))
        })?;
        let applied = self.state.apply(index, &command);
        version::check(self.state.cluster_version())
            .map_err(|why| self.give_up(format!("log entry {log_id}: {why}")))?;
        tracing::trace!(index, command = command.name(), reply = ?applied.reply, "applied");
        if !applied.jobs.is_empty() {
            // Nobody listening is fine.
            let _ = self.changes.send(Change::Jobs(applied.jobs.into()));
        }
        Ok(codec::encode(REPLY_VERSION, &applied.reply))
    }

    fn image(&self) -> State {
        self.state.clone()
    }

    fn encode(image: &State) -> Vec<u8> {
        image.encode_snapshot()
    }

    fn decode(&self, snapshot: &[u8]) -> Result<State, String> {
        let state = State::decode_snapshot(snapshot).map_err(|error| match error {
            codec::CodecError::UnknownVersion { .. } => self.give_up(format!(
                "the snapshot cannot be read by this program ({error}): it was written by a newer version; start that \
                 version on this master"
            )),
            error => error.to_string(),
        })?;
        version::check(state.cluster_version()).map_err(|why| self.give_up(why))?;
        Ok(state)
    }

    fn replace(&mut self, image: State) -> State {
        let old = std::mem::replace(&mut self.state, image);
        let _ = self.changes.send(Change::Everything);
        old
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_raft_store::log_id;

    fn tick(now_ms: u64) -> Vec<u8> {
        Command::Tick { now_ms }.encode().unwrap()
    }

    #[test]
    fn applies_answers_and_survives_a_snapshot() {
        let (mut machine, _changes) = Machine::new();
        let reply = machine.apply(log_id(1, 1), &tick(5_000)).unwrap();
        assert_eq!(decode_reply(&reply).unwrap(), Reply::Done);
        assert_eq!(machine.state().time_ms(), 5_000);

        let (mut other, changes) = Machine::new();
        let mut changes = changes.subscribe();
        let copy = other.decode(&Machine::encode(&machine.image())).unwrap();
        other.replace(copy);
        assert_eq!(other.state().digest(), machine.state().digest());
        assert!(matches!(changes.try_recv().unwrap(), Change::Everything));
    }

    #[test]
    fn a_bad_snapshot_keeps_the_old_state() {
        let (mut machine, _changes) = Machine::new();
        machine.apply(log_id(1, 1), &tick(5_000)).unwrap();
        assert!(machine.decode(&[1, 2, 3]).is_err());
        assert!(machine.too_old().is_none(), "it is damaged, and not new");
        assert_eq!(machine.state().time_ms(), 5_000);
    }

    #[test]
    fn what_only_a_newer_program_can_apply_is_refused_and_said() {
        let (mut machine, _changes) = Machine::new();
        let why = machine.apply(log_id(1, 1), &[200, 1, 2, 3]).unwrap_err();
        assert!(why.contains("written by a newer version"), "{why}");
        assert_eq!(machine.too_old().map(|said| said.to_string()), Some(why));

        let (machine, _changes) = Machine::new();
        let why = machine.decode(&[200, 1, 2, 3]).unwrap_err();
        assert!(why.contains("written by a newer version"), "{why}");
        assert_eq!(machine.too_old().map(|said| said.to_string()), Some(why));

        let (mut machine, _changes) = Machine::new();
        let raise = Command::SetClusterVersion {
            version: version::supported() + 1,
            now_ms: 1,
        };
        assert!(machine.too_old().is_none());
        let why = machine.apply(log_id(1, 1), &raise.encode().unwrap()).unwrap_err();
        assert!(why.contains("start the version of mooncake_master"), "{why}");
        assert_eq!(machine.too_old().map(|said| said.to_string()), Some(why));
    }
}
