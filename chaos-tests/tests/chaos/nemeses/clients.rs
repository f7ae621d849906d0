//! Clients that die or stand still, and bytes that are damaged on disk or on the wire.

use super::{BLOCK_BYTES, until};
use crate::LONG;
use anyhow::{Context, Result};
use mooncake_chaos::{
    Model, Nemesis, Testbed, TestbedOptions,
    model::{final_folders, journaled_blocks},
};
use serde_json::Value;

/// Where the source stops until a test lets it go on: whole blocks of a file of 16 MiB.
const HELD: u64 = 12 << 20;

struct Transfer {
    bed: Testbed,
    model: Model,
    _folder: tempfile::TempDir,
}

impl Transfer {
    /// One master, two clients, a job of theirs not begun yet.
    async fn new(id: &str) -> Result<Self> {
        let mut bed = Testbed::start(TestbedOptions {
            masters: 1,
            clients: 2,
            balancer: None,
            ..Default::default()
        })
        .await?;
        let folder = tempfile::tempdir()?;
        let model = Model::create(folder.path(), id, &[("a.bin", 16 << 20)])?;
        // Whatever the machine does meanwhile, the transfer is in its middle until `finish`.
        bed.serve(folder.path()).await?.hold_at(HELD);
        Ok(Self {
            bed,
            model,
            _folder: folder,
        })
    }

    async fn begin(&mut self) -> Result<()> {
        let nodes = self.bed.cluster.nodes.clone();
        let targets: Vec<&str> = nodes.iter().map(String::as_str).collect();
        let url = self.bed.source()?.url.clone();
        let request = self.model.request(&self.model.id, &url, &nodes[0], &targets)?;
        let (status, answer) = self.bed.cluster.post_job(&request).await?;
        anyhow::ensure!(status == 201, "{status}: {answer:#}");
        Ok(())
    }

    /// Until client 1 has verified so many bytes.
    async fn arrived(&mut self, bytes: u64) -> Result<()> {
        let id = self.model.id.clone();
        let node = self.bed.cluster.nodes[1].clone();
        self.bed
            .cluster
            .wait_job(&id, LONG, |s| {
                let placements = s["placements"].as_array().map(Vec::as_slice).unwrap_or_default();
                let ours = placements.iter().find(|p| p["node_id"] == *node);
                ours.and_then(|p| p["staged_bytes"].as_u64()) > Some(bytes)
            })
            .await?;
        Ok(())
    }

    /// Lets the source send the rest.
    fn go_on(&self) -> Result<()> {
        self.bed.source()?.release();
        Ok(())
    }

    async fn finish(mut self) -> Result<()> {
        self.go_on()?;
        let done = self.bed.cluster.wait_ended(&self.model.id, LONG).await?;
        assert_eq!(done["status"], "completed", "{done:#}");
        for node in 0..2 {
            let placement = self.bed.cluster.placement(&done, node);
            self.model
                .assert_equal(placement["local_path"].as_str().context("local_path")?)?;
        }
        assert_eq!(self.bed.source()?.bytes_served_again(), 0);
        self.bed.finish();
        Ok(())
    }

    /// The number of a client's attempt.
    async fn attempt(&mut self, node: usize) -> Result<u64> {
        let job = self.bed.cluster.job(&self.model.id).await?;
        let placement = self.bed.cluster.placement(&job, node);
        placement["attempt"].as_u64().context("attempt")
    }

    async fn node(&mut self, node: usize) -> Result<Value> {
        let id = self.bed.cluster.nodes[node].clone();
        self.bed.cluster.get(&format!("/api/v1/nodes/{id}")).await
    }
}

#[tokio::test]
async fn a_killed_client_is_suspected_and_resumes() -> Result<()> {
    let mut t = Transfer::new("killed").await?;
    t.begin().await?;
    t.arrived(2 << 20).await?;
    let fault = Nemesis::KillClient(1).inject(&mut t.bed).await?;
    t.bed.cluster.wait_node_status(1, "suspected").await?;
    assert!(final_folders(&t.bed.cluster.roots[1]).is_empty());
    fault.heal(&mut t.bed).await?;
    t.bed.cluster.wait_node_status(1, "up").await?;
    t.finish().await
}

#[tokio::test]
async fn a_frozen_client_is_suspected_and_keeps_its_work() -> Result<()> {
    let mut t = Transfer::new("frozen").await?;
    t.begin().await?;
    t.arrived(2 << 20).await?;
    let (before, attempt) = (t.node(1).await?, t.attempt(1).await?);
    let fault = Nemesis::FreezeClient(1).inject(&mut t.bed).await?;
    t.bed.cluster.wait_node_status(1, "suspected").await?;
    fault.heal(&mut t.bed).await?;
    t.bed.cluster.wait_node_status(1, "up").await?;
    assert_eq!(
        t.node(1).await?["incarnation"],
        before["incarnation"],
        "the same life"
    );
    t.go_on()?;
    let id = t.model.id.clone();
    t.bed.cluster.wait_ended(&id, LONG).await?;
    assert_eq!(t.attempt(1).await?, attempt, "the same attempt goes on");
    let again = "mooncake_client_refetched_bytes_total";
    assert_eq!(t.bed.cluster.client_metric(1, again).await?, 0);
    t.finish().await
}

#[tokio::test]
async fn a_bit_that_flips_on_the_disk_is_found() -> Result<()> {
    let mut t = Transfer::new("diskbit").await?;
    t.begin().await?;
    // All of what the source gives is there, and known for good: the journal says so after a kill.
    let root = t.bed.cluster.roots[1].clone();
    until("the journal has what came", async || {
        Ok(journaled_blocks(&root)?.len() as u64 == HELD / BLOCK_BYTES)
    })
    .await?;
    let fault = Nemesis::CorruptStaging(1).inject(&mut t.bed).await?;
    assert!(!fault.met_nothing);
    fault.heal(&mut t.bed).await?;
    t.bed.cluster.clients[1].wait_log("damaged=1", LONG).await?;
    t.finish().await
}

#[tokio::test]
async fn bits_that_flip_on_the_wire_are_found_and_cost_a_repeat() -> Result<()> {
    let mut t = Transfer::new("wirebit").await?;
    let nemesis = Nemesis::CorruptWire {
        to: 1,
        from: 0,
        times: 2,
    };
    let fault = nemesis.inject(&mut t.bed).await?;
    t.begin().await?;
    until("both bits have flipped", async || Ok(fault.flips() == 2)).await?;
    assert!(fault.wire_connections() > 0);
    t.go_on()?;
    // Still through the wire, which flips no more.
    let id = t.model.id.clone();
    let done = t.bed.cluster.wait_ended(&id, LONG).await?;
    assert_eq!(done["status"], "completed", "{done:#}");
    fault.heal(&mut t.bed).await?;
    t.finish().await
}
