//! Masters that come and go: laid out, renewed, retired; and the operator's commands that make them members.

use super::{Cluster, POLL, READY_DEADLINE, Seat, loopback};
use crate::process::Process;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::time::Instant;

impl Cluster {
    /// An id that no master ever had.
    fn unused_id(&self) -> u64 {
        let used = self.ids.iter().chain(self.retired.iter().map(|(id, _)| id));
        used.max().map_or(1, |id| id + 1)
    }

    /// Lays out one more master on loopback, with an id that no other ever had, which is not started: it is in no
    /// `--initial-cluster` and does not bootstrap. Gives its index.
    pub fn add_master(&mut self) -> Result<usize> {
        let folder = self.dir.join(format!("master-{}", self.unused_id()));
        let seat = Seat {
            address: loopback(),
            http: loopback(),
            namespace: None,
            folder,
        };
        self.add_master_at(seat)
    }

    /// The same on a seat of its own; everything else is as with the first master.
    pub fn add_master_at(&mut self, seat: Seat) -> Result<usize> {
        let id = self.unused_id();
        let first = self.masters.first().context("there is no master to be like")?;
        let args = joining(
            first.args(),
            &[
                ("--node-id", &id.to_string()),
                ("--data-dir", &seat.folder.display().to_string()),
                ("--rpc-address", &seat.address),
                ("--http-address", &seat.http),
            ],
        );
        let process = first
            .successor(&self.dir, &format!("master-{id}"), args)
            .in_namespace(seat.namespace);
        self.masters.push(process);
        self.ids.push(id);
        self.data_dirs.push(seat.folder);
        self.endpoints.push(format!("http://{}", seat.http));
        self.rpc_addresses.push(seat.address);
        Ok(self.masters.len() - 1)
    }

    /// Takes away the master that was added last; it must have left the cluster.
    pub fn retire_last_master(&mut self) -> Result<()> {
        let (mut process, id) = (self.masters.pop(), self.ids.pop());
        self.data_dirs.pop();
        self.endpoints.pop();
        self.rpc_addresses.pop();
        process.iter_mut().for_each(Process::kill);
        let retired = id.zip(process).context("there is no master")?;
        self.retired.push(retired);
        Ok(())
    }

    /// Puts a new master in the place of one that is lost: the same addresses, an empty folder beside the old one, an id
    /// that no other ever had. Not started, and no member yet. Gives the old id.
    pub fn renew_master(&mut self, master: usize) -> Result<u64> {
        let id = self.unused_id();
        let old = &mut self.masters[master];
        old.kill();
        let folder = self.data_dirs[master].with_file_name(format!("master-{id}"));
        let args = joining(
            old.args(),
            &[
                ("--node-id", &id.to_string()),
                ("--data-dir", &folder.display().to_string()),
            ],
        );
        let new = old.successor(&self.dir, &format!("master-{id}"), args);
        let old = std::mem::replace(old, new);
        let old_id = std::mem::replace(&mut self.ids[master], id);
        self.data_dirs[master] = folder;
        self.retired.push((old_id, old));
        Ok(old_id)
    }

    /// Runs an operator's command (`mooncakectl` … `--json`) against all masters that run, again until it succeeds, as
    /// its documentation allows: there may be no leader, or another change under way.
    pub async fn operate(&mut self, args: &[&str]) -> Result<Value> {
        let until = Instant::now() + READY_DEADLINE;
        loop {
            let running: Vec<usize> = (0..self.masters.len())
                .filter(|&i| self.masters[i].is_running())
                .collect();
            let (code, out, err) = self.ctl(&running, &[args, &["--json"]].concat()).await?;
            if code == 0 {
                return serde_json::from_str(&out).with_context(|| format!("mooncakectl {args:?}: {out}"));
            }
            ensure!(
                Instant::now() < until,
                "mooncakectl {args:?} ends with {code}: {err}"
            );
            tokio::time::sleep(POLL).await;
        }
    }

    /// Waits until the process of a master answers, be it a member or not.
    pub async fn wait_live(&mut self, master: usize) -> Result<()> {
        let url = format!("{}/livez", self.endpoints[master]);
        let until = Instant::now() + READY_DEADLINE;
        while self.http.get(&url).send().await.is_err() {
            ensure!(
                self.masters[master].is_running() && Instant::now() < until,
                "it does not answer\n{}",
                self.masters[master].log_tail()
            );
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }
}

/// The arguments of a master that is to be added to a cluster, after those of one that made it.
fn joining(of: &[String], changed: &[(&str, &str)]) -> Vec<String> {
    let mut args = Vec::new();
    let mut of = of.iter();
    while let Some(arg) = of.next() {
        match arg.as_str() {
            "--bootstrap" => {}
            "--initial-cluster" => {
                of.next();
            }
            flag => match changed.iter().find(|(name, _)| *name == flag) {
                Some((name, value)) => {
                    args.extend([(*name).to_owned(), (*value).to_owned()]);
                    of.next();
                }
                None => args.push(arg.clone()),
            },
        }
    }
    args
}

#[cfg(test)]
mod tests {
    use super::{super::strings, *};

    #[test]
    fn a_master_that_joins_has_the_flags_of_the_others_and_makes_no_cluster() {
        let of = strings(&[
            "--node-id",
            "1",
            "--data-dir",
            "/a",
            "--initial-cluster",
            "1=h:1/h:2",
            "--bootstrap",
            "--cluster-secret-file",
            "/s",
        ]);
        assert_eq!(
            joining(&of, &[("--node-id", "4"), ("--data-dir", "/b")]),
            strings(&[
                "--node-id",
                "4",
                "--data-dir",
                "/b",
                "--cluster-secret-file",
                "/s"
            ])
        );
    }
}
