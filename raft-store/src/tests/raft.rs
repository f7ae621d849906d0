//! Under a real Raft of one node: every entry is answered, and the state comes back after restarts.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use openraft::errors::{RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::RPCOption;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, VoteRequest, VoteResponse,
};
use openraft::{AnyError, Config, OptionalSend, Raft, RaftNetworkFactory, RaftNetworkV2, SnapshotPolicy};

use super::*;

/// There is nobody else.
struct Alone;

fn unreachable() -> Unreachable<TypeConfig> {
    Unreachable::new(&AnyError::error("there is one node"))
}

impl RaftNetworkV2<TypeConfig> for Alone {
    type SnapshotData = SnapshotData;

    async fn append_entries(
        &mut self,
        _: AppendEntriesRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(RPCError::Unreachable(unreachable()))
    }

    async fn vote(
        &mut self,
        _: VoteRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(RPCError::Unreachable(unreachable()))
    }

    async fn full_snapshot(
        &mut self,
        _: Vote,
        _: Snapshot,
        _: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        Err(StreamingError::Unreachable(unreachable()))
    }
}

impl RaftNetworkFactory<TypeConfig> for Alone {
    type Network = Alone;

    async fn new_client(&mut self, _: NodeId, _: &Node) -> Alone {
        Alone
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_node_answers_every_entry_and_comes_back_with_all_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let config = Arc::new(
        Config {
            snapshot_policy: SnapshotPolicy::LogsSinceLast(40),
            max_in_snapshot_log_to_keep: 5,
            purge_batch_size: 1,
            ..Config::default()
        }
        .validate()
        .unwrap(),
    );
    let mut expected = Chain::default();
    for life in 0..4_u64 {
        let store = open(folder.path());
        assert_eq!(store.is_pristine(), life == 0);
        let machine = store.state_machine(Chain::default()).unwrap();
        let reader = machine.reader();
        let node = Node {
            disk_id: store.identity().disk_id.clone(),
            ..Node::default()
        };
        let raft = Raft::new(
            1,
            Arc::clone(&config),
            Alone,
            store.take_log_store().unwrap(),
            machine,
        )
        .await
        .unwrap();
        if life == 0 {
            raft.initialize(BTreeMap::from([(1, node.clone())]))
                .await
                .unwrap();
        }
        raft.wait(Some(Duration::from_secs(20)))
            .current_leader(1, "the only node leads")
            .await
            .unwrap();
        for number in 0..100 {
            let command = content(life, number);
            let written = raft.client_write(Command(command.clone())).await.unwrap();
            expected.apply(written.log_id, &command).unwrap();
            assert_eq!(written.data, Reply(expected.count.to_le_bytes().to_vec()));
            assert!(
                reader.read().index() >= written.log_id.index(),
                "the answer can be read"
            );
        }
        assert_eq!(reader.read().machine, expected);
        assert_eq!(reader.read().membership.get_node(&1), Some(&node));
        raft.shutdown().await.unwrap();
        drop(raft);
        store.close().await.unwrap();
    }
    assert_eq!(files(&folder.path().join("snapshots"), "").len(), 1);
    let store = open(folder.path());
    let mut log = store.take_log_store().unwrap();
    assert!(
        log.get_log_state().await.unwrap().last_purged_log_id.is_some(),
        "the log was purged"
    );
}
