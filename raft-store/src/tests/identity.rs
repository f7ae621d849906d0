//! Who a folder belongs to.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_keeps_its_random_id_and_stops_being_pristine() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = open(one.path());
    let identity = store.identity().clone();
    assert_eq!(
        (identity.cluster_id.as_str(), identity.node_id),
        ("test-cluster", 1)
    );
    assert_ne!(identity.disk_id, open(two.path()).identity().disk_id);
    assert!(store.is_pristine() && !store.holds_only_a_vote());
    store.close().await.unwrap();

    let store = open(one.path());
    assert_eq!(*store.identity(), identity);
    assert!(store.is_pristine(), "opened and closed is not used");
    let mut log = store.take_log_store().unwrap();
    assert!(store.take_log_store().is_none(), "there is one writer");
    log.save_vote(&Vote::new(1, 1)).await.unwrap();
    close(store, log).await;

    let store = open(one.path());
    assert!(!store.is_pristine());
    assert!(store.holds_only_a_vote());
    assert_eq!(*store.identity(), identity);
    store.close().await.unwrap();

    let full = tempfile::tempdir().unwrap();
    fill(full.path()).await;
    assert!(!open(full.path()).holds_only_a_vote());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_cluster_or_node_id_is_refused_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path()).await;
    for (cluster_id, node_id, what) in [
        ("other", 1, "cluster id is \"test-cluster\""),
        ("test-cluster", 2, "node id is \"1\""),
    ] {
        let options = OpenOptions {
            cluster_id: cluster_id.into(),
            node_id,
        };
        let error = Store::open(folder.path(), options).err().unwrap();
        assert!(matches!(error, OpenError::Foreign { .. }), "{error}");
        assert!(error.to_string().contains(what), "{error}");
        assert!(
            error.to_string().contains("Correct the flag or the path"),
            "{error}"
        );
    }
    let store = open(folder.path());
    let mut log = store.take_log_store().unwrap();
    assert_filled(&store, &mut log).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_has_one_owner_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    let error = Store::open(folder.path(), options()).err().unwrap();
    assert!(matches!(error, OpenError::Locked { .. }), "{error}");
    store.close().await.unwrap();
    open(folder.path());
}
