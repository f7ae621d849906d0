//! Upload slots for tasks: [`UploadSlots`] decides, this waits.

use crate::swarm::{
    sent::ConnectionId,
    slots::{Rank, UploadSlots},
};
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc};
use tokio::sync::oneshot;

struct State {
    slots: UploadSlots,
    /// Those that wait.
    wakers: HashMap<ConnectionId, oneshot::Sender<Turn>>,
}

/// The slots of one node.
pub(super) struct Turns {
    /// Short sections; a [`Turn`] is never dropped within one.
    state: Mutex<State>,
}

/// A slot, until it is dropped.
pub(super) struct Turn {
    turns: Arc<Turns>,
    who: ConnectionId,
}

impl Turns {
    pub(super) fn new(max: usize) -> Self {
        Self {
            state: Mutex::new(State {
                slots: UploadSlots::new(max),
                wakers: HashMap::new(),
            }),
        }
    }

    /// A slot for `who`, in turn. One at a time.
    pub(super) async fn take(self: Arc<Self>, who: ConnectionId, rank: Rank) -> Turn {
        let woken = {
            let mut state = self.state.lock();
            if state.slots.ask(who, rank) {
                drop(state);
                return Turn { turns: self, who };
            }
            let (waker, woken) = oneshot::channel();
            state.wakers.insert(who, waker);
            woken
        };
        let _waiting = Waiting { turns: &self, who };
        woken
            .await
            .expect("a waker is only removed to be used, or by this")
    }
}

impl Turns {
    /// `who`, if it waits, has something better to send.
    pub(super) fn improve(&self, who: ConnectionId, rank: Rank) {
        self.state.lock().slots.improve(who, rank);
    }
}

/// Who waits no longer, because its turn came or because it does not care, is struck off the list.
struct Waiting<'a> {
    turns: &'a Turns,
    who: ConnectionId,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state.lock();
        state.slots.withdraw(self.who);
        state.wakers.remove(&self.who);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let next = {
            let mut state = self.turns.state.lock();
            let next = state.slots.give_back(self.who);
            next.map(|who| (who, state.wakers.remove(&who).expect("who waits has a waker")))
        };
        if let Some((who, waker)) = next {
            let turns = self.turns.clone();
            // Who stopped waiting in this instant lets the turn fall, which passes it on.
            let _ = waker.send(Turn { turns, who });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn in_turn_and_nobody_is_forgotten() {
        let turns = Arc::new(Turns::new(1));
        let first = turns.clone().take(1, Rank::Again).now_or_never().expect("free");
        let mut second = Box::pin(turns.clone().take(2, Rank::Again));
        let mut third = Box::pin(turns.clone().take(3, Rank::Again));
        let mut fourth = Box::pin(turns.clone().take(4, Rank::Again));
        assert!(second.as_mut().now_or_never().is_none());
        assert!(third.as_mut().now_or_never().is_none());
        assert!(fourth.as_mut().now_or_never().is_none());
        // Who gives up while it waits, and who gives up when its turn has come, are passed over.
        drop(second);
        drop(first);
        drop(third);
        let fourth = fourth.as_mut().now_or_never().expect("the only one left");
        assert_eq!(turns.state.lock().slots.taken(), 1);
        // Out of turn.
        let mut fifth = Box::pin(turns.clone().take(5, Rank::Again));
        let mut sixth = Box::pin(turns.clone().take(6, Rank::Again));
        let mut seventh = Box::pin(turns.clone().take(7, Rank::First));
        assert!(fifth.as_mut().now_or_never().is_none());
        assert!(sixth.as_mut().now_or_never().is_none());
        assert!(seventh.as_mut().now_or_never().is_none());
        drop(fourth);
        drop(seventh.as_mut().now_or_never().expect("a first copy"));
        let fifth = fifth.as_mut().now_or_never().expect("the next in turn");
        turns.improve(6, Rank::First);
        let mut eighth = Box::pin(turns.clone().take(8, Rank::First));
        assert!(eighth.as_mut().now_or_never().is_none());
        drop(fifth);
        drop(sixth.as_mut().now_or_never().expect("it waits for longer"));
        drop(eighth.as_mut().now_or_never().expect("the last"));
        assert_eq!(turns.state.lock().slots.taken(), 0);
    }
}
