//! Debian's etcd under the same measurement, as the yardstick.

use super::{Asker, Fault, GIVE_UP, Subject, WRITE_TIMEOUT, cut_off, etcd_rpc::Kv, testbed};
use crate::{
    process::Process,
    testbed::{Balancer, Testbed, master_host},
};
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures_util::{FutureExt, future::BoxFuture};
use serde_json::{Value, json};
use std::{
    path::Path,
    time::{Duration, Instant},
};

const PROGRAM: &str = "/usr/bin/etcd";
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;
const MEMBERS: usize = 3;
/// In the alphabet of base64, which is how the HTTP gateway takes keys and values.
const KEY: &str = "bW9vbmNha2U=";

/// Says how to get it where it is wanted and missing, or which arguments do `without` it.
pub fn etcd_is_there(wanted: bool, without: &str) -> Result<()> {
    ensure!(
        !wanted || Path::new(PROGRAM).exists(),
        "{PROGRAM} is missing: install Debian's etcd-server (scripts/setup.sh etcd-server), or measure without it \
         ({without})"
    );
    Ok(())
}

/// Three members behind HAProxy, on the hosts that masters have. Every write is a `put` of a value of the size of a
/// small job through the HTTP gateway; a member that does not lead passes it on, as a master does. (Rates are measured over
/// gRPC, see [`Etcd::putters`]: the gateway is not what etcd's own clients use, and would be the limit.)
pub struct Etcd {
    bed: Testbed,
    members: Vec<Process>,
    _balancer: Balancer,
    url: String,
    name: String,
    value: String,
}

impl Etcd {
    /// Starts it with these timers; `None`: its defaults (100 and 1000 ms).
    pub async fn start(timers_ms: Option<(u64, u64)>) -> Result<Self> {
        etcd_is_there(true, "see --help")?;
        let bed = testbed(MEMBERS, 0, None).await?;
        let address =
            |i: usize| -> Result<String> { Ok(bed.network.host(&master_host(i))?.address.to_string()) };
        let peers: Vec<String> = (0..MEMBERS)
            .map(|i| Ok(format!("m{i}=http://{}:{PEER_PORT}", address(i)?)))
            .collect::<Result<_>>()?;
        let mut members = Vec::new();
        for i in 0..MEMBERS {
            let (host, data) = (address(i)?, bed.dir().join(format!("etcd-{i}")));
            let client = format!("http://{host}:{CLIENT_PORT}");
            let peer = format!("http://{host}:{PEER_PORT}");
            let mut args: Vec<String> = [
                ("--name", format!("m{i}")),
                ("--data-dir", data.display().to_string()),
                ("--listen-client-urls", client.clone()),
                ("--advertise-client-urls", client),
                ("--listen-peer-urls", peer.clone()),
                ("--initial-advertise-peer-urls", peer),
                ("--initial-cluster", peers.join(",")),
                ("--initial-cluster-state", "new".into()),
                ("--logger", "zap".into()),
            ]
            .into_iter()
            .flat_map(|(flag, value)| [flag.to_owned(), value])
            .collect();
            if let Some((heartbeat, election)) = timers_ms {
                args.push(format!("--heartbeat-interval={heartbeat}"));
                args.push(format!("--election-timeout={election}"));
            }
            let namespace = bed.network.host(&master_host(i))?.namespace.clone();
            let mut member = Process::new(bed.dir(), &format!("etcd-{i}"), PROGRAM.into(), args)
                .in_namespace(Some(namespace));
            member.start()?;
            members.push(member);
        }
        let servers: Vec<String> = (0..MEMBERS)
            .map(|i| Ok(format!("{}:{CLIENT_PORT}", address(i)?)))
            .collect::<Result<_>>()?;
        let balancer = bed.balancer_for(&servers, "/health")?;
        let name = match timers_ms {
            None => "etcd, defaults (100/1000 ms)".to_owned(),
            Some((heartbeat, election)) => format!("etcd, {heartbeat}/{election} ms"),
        };
        Ok(Self {
            bed,
            members,
            url: balancer.url.clone(),
            _balancer: balancer,
            name,
            value: "A".repeat(1368),
        })
    }

    /// Callers over gRPC, each with a connection of its own to one member; members by turns. Puts of a value of this size
    /// under keys that begin with `prefix` and end with a number.
    pub fn putters(&self, callers: usize, prefix: &str, value_bytes: usize) -> Result<Vec<Asker>> {
        let value = Bytes::from(vec![b'v'; value_bytes]);
        let ask = |kv: Kv| -> Asker {
            let (prefix, value) = (prefix.to_owned(), value.clone());
            Box::new(move |number| {
                let (kv, value, key) = (kv.clone(), value.clone(), format!("{prefix}{number}"));
                async move { kv.put(key.into(), value).await }.boxed()
            })
        };
        Ok(self.connect(callers)?.into_iter().map(ask).collect())
    }

    /// The same, ranges over one key that is there.
    pub fn readers(&self, callers: usize, key: &str, stale: bool) -> Result<Vec<Asker>> {
        let key = Bytes::from(key.to_owned());
        let ask = |kv: Kv| -> Asker {
            let key = key.clone();
            Box::new(move |_| {
                let (kv, key) = (kv.clone(), key.clone());
                async move { kv.get(key, stale).await.map(drop) }.boxed()
            })
        };
        Ok(self.connect(callers)?.into_iter().map(ask).collect())
    }

    fn connect(&self, callers: usize) -> Result<Vec<Kv>> {
        let connect = |caller| {
            let host = self.bed.network.host(&master_host(caller % MEMBERS))?.address;
            Kv::new(&format!("http://{host}:{CLIENT_PORT}"), WRITE_TIMEOUT)
        };
        (0..callers).map(connect).collect()
    }

    fn put(&self) -> reqwest::RequestBuilder {
        self.post("put").json(&json!({ "key": KEY, "value": self.value }))
    }

    fn post(&self, what: &str) -> reqwest::RequestBuilder {
        self.bed.cluster.http.post(format!("{}/v3/kv/{what}", self.url))
    }

    /// Removes it all.
    pub fn finish(mut self) {
        self.members.iter_mut().for_each(Process::kill);
        self.bed.finish();
    }

    async fn status(&self, member: usize) -> Result<Value> {
        let host = self.bed.network.host(&master_host(member))?.address;
        let url = format!("http://{host}:{CLIENT_PORT}/v3/maintenance/status");
        let request = self.bed.cluster.http.post(url).json(&json!({}));
        Ok(request
            .timeout(Duration::from_secs(1))
            .send()
            .await?
            .json()
            .await?)
    }

    async fn look(&self) -> Result<(usize, u64)> {
        let mut seen = Vec::new();
        for member in 0..MEMBERS {
            seen.push(self.status(member).await?);
        }
        let number = |value: &Value| value.as_str().and_then(|text| text.parse::<u64>().ok());
        let leader = seen[0]["leader"].as_str().context("no leader")?;
        ensure!(
            seen.iter()
                .all(|s| s["leader"] == leader && s["raftTerm"] == seen[0]["raftTerm"]),
            "they do not agree"
        );
        let applied: Vec<u64> = seen
            .iter()
            .map(|s| number(&s["raftAppliedIndex"]).context("no applied index"))
            .collect::<Result<_>>()?;
        let (least, most) = (applied.iter().min(), applied.iter().max());
        ensure!(
            most.zip(least).is_some_and(|(most, least)| most == least),
            "one lags behind"
        );
        let at = seen
            .iter()
            .position(|s| s["header"]["member_id"] == leader)
            .context("the leader is not among them")?;
        Ok((at, number(&seen[0]["raftTerm"]).context("no term")?))
    }
}

impl Subject for Etcd {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn settled(&mut self) -> BoxFuture<'_, Result<(usize, u64)>> {
        async {
            let deadline = Instant::now() + GIVE_UP;
            loop {
                match self.look().await {
                    Ok(found) => return Ok(found),
                    Err(error) if Instant::now() >= deadline => {
                        let why = format!("{} does not settle within {GIVE_UP:?}", self.name);
                        return Err(error.context(why));
                    }
                    Err(_) => tokio::time::sleep(super::POLL).await,
                }
            }
        }
        .boxed()
    }

    fn write(&self, _number: u64) -> BoxFuture<'static, Result<u64>> {
        let request = self.put();
        async move {
            let answer = request.send().await?.error_for_status()?;
            let answer: Value = answer.json().await?;
            let term = answer["header"]["raft_term"].as_str().context("no raft_term")?;
            Ok(term.parse()?)
        }
        .boxed()
    }

    fn inject(&mut self, member: usize, fault: Fault) -> Result<()> {
        match fault {
            Fault::Kill => self.members[member].signal(rustix::process::Signal::KILL),
            Fault::Freeze => self.members[member].freeze(),
            Fault::CutOff => cut_off(&mut self.bed.network, &master_host(member)),
        }
    }

    fn heal(&mut self, member: usize, fault: Fault) -> Result<()> {
        match fault {
            Fault::Kill => {
                self.members[member].kill();
                self.members[member].start()
            }
            Fault::Freeze => self.members[member].thaw(),
            Fault::CutOff => self.bed.network.heal(),
        }
    }
}
