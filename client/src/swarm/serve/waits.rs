//! What a block waits for before it goes out: room, a slot, the rate. Control messages go out meanwhile.

use super::{BUSY_AFTER, Peer, Server, Turn, decline};
use crate::{
    swarm::{sent::ConnectionId, slots::Rank},
    transport::{FrameSender, Room},
};
use mooncake_proto::pb::peer as pb;
use prost::bytes::Bytes;
use std::{io, sync::atomic::Ordering};
use tokio::sync::mpsc;

/// What a connection has waited for at the rate, less what it has sent since. Below zero after a block that was longer
/// than the one which was to be sent when it waited.
pub(super) type Balance = i64;

/// Room for the next block, where the transport sets some aside; `None` if that takes too long: others may have the block.
/// Control messages go out meanwhile, what the peer waits for among them.
pub(super) async fn room(
    peer: &Peer,
    sender: &mut Box<dyn FrameSender>,
    control: &mut mpsc::Receiver<Bytes>,
) -> io::Result<Option<Room>> {
    let room = sender.room(peer.next_len());
    let deadline = tokio::time::sleep(BUSY_AFTER);
    tokio::pin!(room, deadline);
    loop {
        tokio::select! {
            biased;
            room = &mut room => return room.map(Some),
            Some(message) = control.recv() => sender.send_control(message).await?,
            () = &mut deadline => return Ok(None),
        }
    }
}

impl Server {
    /// Declines a request: its puller asks again, or somebody else.
    pub(super) async fn busy(&self, sender: &mut Box<dyn FrameSender>, request: u64) -> io::Result<()> {
        self.stats.declined_busy.fetch_add(1, Ordering::Relaxed);
        sender
            .send_control(decline(request, pb::DeclineReason::Busy))
            .await
    }

    /// An upload slot, in turn; `None` if that takes too long. Control messages go out meanwhile.
    pub(super) async fn slot(
        &self,
        who: ConnectionId,
        rank: Rank,
        sender: &mut Box<dyn FrameSender>,
        control: &mut mpsc::Receiver<Bytes>,
    ) -> io::Result<Option<Turn>> {
        let slot = self.uploads.clone().take(who, rank);
        let deadline = tokio::time::sleep(BUSY_AFTER);
        tokio::pin!(slot, deadline);
        loop {
            tokio::select! {
                biased;
                slot = &mut slot => return Ok(Some(slot)),
                Some(message) = control.recv() => sender.send_control(message).await?,
                () = &mut deadline => return Ok(None),
            }
        }
    }

    /// Until the next block may go out, if a person has set a limit. Control messages go out meanwhile; and the block
    /// stays in the queue, where it can be canceled.
    pub(super) async fn wait_for_rate(
        &self,
        peer: &Peer,
        balance: &mut Balance,
        sender: &mut Box<dyn FrameSender>,
        control: &mut mpsc::Receiver<Bytes>,
    ) -> io::Result<()> {
        let due = Balance::from(peer.next_len()) - *balance;
        let Ok(due) = u64::try_from(due) else {
            return Ok(());
        };
        let allowed = self.rate.wait(due);
        tokio::pin!(allowed);
        loop {
            tokio::select! {
                biased;
                () = &mut allowed => {
                    *balance = balance.saturating_add_unsigned(due);
                    return Ok(());
                }
                Some(message) = control.recv() => sender.send_control(message).await?,
            }
        }
    }
}
