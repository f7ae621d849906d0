//! openraft's own suite.

use openraft::StorageError;
use openraft::testing::log::{StoreBuilder, Suite};
use tempfile::TempDir;

use super::*;

struct Builder;

impl StoreBuilder<TypeConfig, LogStore, StateMachineStore<Chain>, (TempDir, Store)> for Builder {
    async fn build(
        &self,
    ) -> Result<((TempDir, Store), LogStore, StateMachineStore<Chain>), StorageError<TypeConfig>> {
        let folder = tempfile::tempdir().unwrap();
        let store = open(folder.path());
        let (log, machine) = (
            store.take_log_store().unwrap(),
            store.state_machine(Chain::default()).unwrap(),
        );
        Ok(((folder, store), log, machine))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn openraft_suite() {
    Suite::test_all(Builder).await.unwrap();
}
