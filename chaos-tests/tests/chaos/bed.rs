//! The testbed keeps its own promises: separate hosts, shaped links, filters, wires, disks, nothing left behind.

use crate::LONG;
use anyhow::{Context, Result, ensure};
use mooncake_chaos::{
    Cluster, Model, Testbed, TestbedOptions,
    testbed::{Rule, WireFault, command, run},
};
use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// For a packet that is cut off and would need for ever: longer than one that is not lost takes.
const SHORT: Duration = Duration::from_millis(300);

fn bare(hosts: usize) -> TestbedOptions {
    TestbedOptions {
        masters: hosts,
        clients: 0,
        balancer: None,
        ..Default::default()
    }
}

/// Whether a connection from host `from` to a listener on host `to` carries a byte there and back.
async fn reaches(bed: &mut Testbed, from: &str, to: &str) -> Result<bool> {
    reaches_within(bed, from, to, LONG).await
}

/// Whether none does.
async fn is_cut_off(bed: &mut Testbed, from: &str, to: &str) -> Result<bool> {
    Ok(!reaches_within(bed, from, to, SHORT).await?)
}

async fn reaches_within(bed: &mut Testbed, from: &str, to: &str, patience: Duration) -> Result<bool> {
    let address = bed.network.host(to)?.address;
    let (tell, told) = tokio::sync::oneshot::channel();
    let server = bed.network.host_mut(to)?.runtime()?.spawn(async move {
        let listener = tokio::net::TcpListener::bind((address, 0)).await.unwrap();
        tell.send(listener.local_addr().unwrap()).unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        let byte = stream.read_u8().await.unwrap();
        stream.write_u8(byte + 1).await.unwrap();
    });
    let to = told.await?;
    let client = bed.network.host_mut(from)?.runtime()?.spawn(async move {
        let mut stream = tokio::net::TcpStream::connect(to).await?;
        stream.write_u8(1).await?;
        stream.read_u8().await
    });
    let answer = tokio::time::timeout(patience, client).await;
    server.abort();
    Ok(matches!(answer, Ok(Ok(Ok(2)))))
}

#[tokio::test]
async fn cuts_are_one_way_two_way_or_by_group_and_heal() -> Result<()> {
    let mut bed = Testbed::prepare(bare(3)).await?;
    assert!(reaches(&mut bed, "m1", "m2").await?);
    let half = bed.network.cut("m1", "m2")?;
    // A connection needs both ways, whoever opens it.
    assert!(is_cut_off(&mut bed, "m1", "m2").await? && is_cut_off(&mut bed, "m2", "m1").await?);
    assert!(reaches(&mut bed, "m1", "m3").await?);
    bed.network.remove_rules(&[half])?;
    assert!(reaches(&mut bed, "m1", "m2").await?);

    // One way is one way: datagrams still go from m2 to m1.
    bed.network.cut("m1", "m2")?;
    let address = bed.network.host("m1")?.address;
    let receive = bed.network.host_mut("m1")?.runtime()?.spawn(async move {
        let socket = tokio::net::UdpSocket::bind((address, 7000)).await.unwrap();
        socket.recv(&mut [0; 8]).await.unwrap()
    });
    bed.network.host_mut("m2")?.runtime()?.spawn(async move {
        let socket = tokio::net::UdpSocket::bind("0.0.0.0:0").await.unwrap();
        loop {
            // Refused until the receiver is there.
            let _ = socket.send_to(b"x", (address, 7000)).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert_eq!(tokio::time::timeout(LONG, receive).await??, 1);
    bed.network.heal()?;

    bed.network.partition(&[&["m1", "m2"], &["m2", "m3"]])?;
    assert!(reaches(&mut bed, "m1", "m2").await? && reaches(&mut bed, "m3", "m2").await?);
    assert!(
        is_cut_off(&mut bed, "m1", "m3").await?,
        "only the bridge sees both sides"
    );
    bed.network.heal()?;
    let cable = bed.network.isolate("m1")?;
    assert!(is_cut_off(&mut bed, "m2", "m1").await? && is_cut_off(&mut bed, "m1", "m3").await?);
    bed.network.remove_rules(&[cable])?;
    assert!(reaches(&mut bed, "m2", "m1").await?);

    // A refusal is answered at once.
    let from = bed.network.host("m2")?.address;
    let to = bed.network.host("m1")?.address;
    bed.network.add_rule("m1", Rule::Refuse { from })?;
    let dial = bed
        .network
        .host_mut("m2")?
        .runtime()?
        .spawn(async move { tokio::net::TcpStream::connect((to, 9)).await.map(drop) });
    let refused = tokio::time::timeout(LONG, dial).await??.unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    bed.finish();
    Ok(())
}

/// Moves `bytes` from one host to another; bytes per second.
async fn throughput(bed: &mut Testbed, from: &str, to: &str, bytes: u64) -> Result<f64> {
    let address = bed.network.host(to)?.address;
    let (tell, told) = tokio::sync::oneshot::channel();
    let sink = bed.network.host_mut(to)?.runtime()?.spawn(async move {
        let listener = tokio::net::TcpListener::bind((address, 0)).await.unwrap();
        tell.send(listener.local_addr().unwrap()).unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        tokio::io::copy(&mut stream, &mut tokio::io::sink())
            .await
            .unwrap()
    });
    let to = told.await?;
    let started = Instant::now();
    bed.network.host_mut(from)?.runtime()?.spawn(async move {
        let mut stream = tokio::net::TcpStream::connect(to).await.unwrap();
        let source = tokio::io::repeat(7).take(bytes);
        tokio::io::copy(&mut { source }, &mut stream).await.unwrap();
    });
    assert_eq!(tokio::time::timeout(LONG, sink).await??, bytes);
    Ok(bytes as f64 / started.elapsed().as_secs_f64())
}

#[tokio::test]
async fn links_are_shaped_both_ways_and_losses_are_seen() -> Result<()> {
    let mut options = bare(2);
    options.link = Some(40_000_000);
    let mut bed = Testbed::prepare(options).await?;
    // A shaped link is never faster than its rate and one burst. (How near it comes is for benchmarks.)
    for (from, to) in [("m1", "m2"), ("m2", "m1")] {
        let rate = throughput(&mut bed, from, to, 4 << 20).await?;
        assert!(
            rate < 5.5e6,
            "{from} to {to}: {rate} bytes per second over 40 mbit/s"
        );
    }
    bed.network.shape("m1", None)?;
    bed.network.shape("m2", None)?;
    let free = throughput(&mut bed, "m1", "m2", 16 << 20).await?;
    assert!(free > 5.5e6, "without a shape: {free} bytes per second");

    bed.network.add_rule("m2", Rule::Lose { percent: 20 })?;
    let address = bed.network.host("m2")?.address;
    let (tell, bound) = tokio::sync::oneshot::channel();
    let received = bed.network.host_mut("m2")?.runtime()?.spawn(async move {
        let socket = tokio::net::UdpSocket::bind((address, 7000)).await.unwrap();
        tell.send(()).unwrap();
        let mut received = 0;
        // Zero ends it; it may be lost too, so many are sent.
        while { socket.recv(&mut [0; 1]).await.unwrap() } != 0 {
            received += 1;
        }
        received
    });
    bed.network.host_mut("m1")?.runtime()?.spawn(async move {
        let socket = tokio::net::UdpSocket::bind("0.0.0.0:0").await.unwrap();
        bound.await.unwrap();
        for _ in 0..1000 {
            let _ = socket.send_to(b"x", (address, 7000)).await;
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        for _ in 0..50 {
            let _ = socket.send_to(b"", (address, 7000)).await;
        }
    });
    let received = tokio::time::timeout(LONG, received).await??;
    assert!((650..950).contains(&received), "{received} of 1000 at 20 % loss");
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn a_wire_takes_over_connections_and_flips_bits() -> Result<()> {
    let mut bed = Testbed::prepare(bare(2)).await?;
    let to = bed.rpc_address(1)?;
    bed.network.host_mut("m2")?.runtime()?.spawn(async move {
        let listener = tokio::net::TcpListener::bind(to).await.unwrap();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    let connect = async |bed: &mut Testbed| -> Result<tokio::net::TcpStream> {
        let dial = bed.network.host_mut("m1")?.runtime()?.spawn(async move {
            loop {
                if let Ok(stream) = tokio::net::TcpStream::connect(to).await {
                    return stream;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        Ok(tokio::time::timeout(LONG, dial).await??)
    };
    let echo = async |stream: &mut tokio::net::TcpStream| -> std::io::Result<Vec<u8>> {
        stream.write_all(&[0; 1000]).await?;
        let mut back = vec![0; 1000];
        stream.read_exact(&mut back).await?;
        Ok(back)
    };
    let mut before = connect(&mut bed).await?;
    assert_eq!(echo(&mut before).await?, [0; 1000]);
    let (wire, token) = bed.add_wire("m1", to).await?;
    wire.set(WireFault::FlipBits {
        every_bytes: 300,
        times: 2,
    });
    assert!(
        echo(&mut before).await.is_err(),
        "a connection from before is reset"
    );
    let mut through = connect(&mut bed).await?;
    let back = echo(&mut through).await?;
    let flipped: Vec<_> = (0..1000).filter(|&i| back[i] != 0).collect();
    assert_eq!(
        (flipped, wire.flips(), wire.connections()),
        (vec![300, 600], 2, 1)
    );
    wire.set(WireFault::Stall);
    assert!(tokio::time::timeout(SHORT, echo(&mut through)).await.is_err());
    bed.remove_wire(wire, token)?;
    let mut after = connect(&mut bed).await?;
    assert_eq!(echo(&mut after).await?, [0; 1000]);
    bed.finish();
    Ok(())
}

#[tokio::test]
async fn a_distribution_crosses_the_network() -> Result<()> {
    let mut bed = Testbed::start(TestbedOptions {
        clients: 2,
        ..Default::default()
    })
    .await?;
    let folder = tempfile::tempdir()?;
    let model = Model::create(folder.path(), "net", &[("a.bin", 5 << 20), ("b/c.bin", 1 << 20)])?;
    let url = bed.serve(folder.path()).await?.url.clone();
    let nodes: Vec<String> = bed.cluster.nodes.clone();
    let targets: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let request = model.request("net-1", &url, &nodes[0], &targets)?;
    // Through the load balancer.
    let url = format!("{}/api/v1/model-distribution/jobs", bed.url());
    let answer = bed.cluster.http.post(url).json(&request).send().await?;
    assert_eq!(answer.status(), 201, "{}", answer.text().await?);
    let done = bed.cluster.wait_ended("net-1", LONG).await?;
    assert_eq!(done["status"], "completed", "{done:#}");
    for node in 0..2 {
        let placement = bed.cluster.placement(&done, node);
        model.assert_equal(placement["local_path"].as_str().context("local_path")?)?;
    }
    assert_eq!(bed.source()?.bytes_served(), model.total_bytes()?);
    bed.finish();
    Ok(())
}

/// What of run `number` is still there.
fn left_of(number: u64, dir: &Path) -> Result<Vec<String>> {
    let mut left = Vec::new();
    let names = command("ip", &["netns", "list"], "")? + &command("ip", &["-o", "link"], "")?;
    let ours = format!("mt{number}");
    left.extend(
        names
            .split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'))
            .filter(|w| *w == ours || w.starts_with(&format!("{ours}-")))
            .map(str::to_owned),
    );
    let mounts = std::fs::read_to_string("/proc/self/mounts")?;
    left.extend(
        mounts
            .lines()
            .filter(|l| l.contains(dir.to_str().unwrap()))
            .map(str::to_owned),
    );
    if dir.exists() {
        left.push(dir.display().to_string());
    }
    if run::runs()?.iter().any(|(n, _)| u64::from(*n) == number) {
        left.push("its record".into());
    }
    Ok(left)
}

fn alive(pid: u64) -> bool {
    // A zombie is dead.
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.contains(") Z "))
}

/// Starts the `testbed` program, ends it with `signal`, and requires that nothing is left.
async fn ends_clean(signal: rustix::process::Signal) -> Result<()> {
    // Every testbed that begins removes what dead ones left: nobody else may, meanwhile.
    let _turn = Cluster::turn().await?;
    let mut child = Command::new(env!("CARGO_BIN_EXE_testbed"))
        // As a person would start it; under cargo it would build the product first.
        .env_remove("CARGO")
        .args([
            "up",
            "--masters",
            "1",
            "--clients",
            "1",
            "--link",
            "400mbit",
            "--json",
        ])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("stdout")?).read_line(&mut line)?;
    let up: serde_json::Value = serde_json::from_str(&line).context("the description")?;
    let number = up["run"].as_u64().context("run")?;
    let dir = Path::new(up["dir"].as_str().context("dir")?).to_owned();
    let pids: Vec<u64> = ["masters", "clients"]
        .iter()
        .flat_map(|k| up[k].as_array().into_iter().flatten())
        .chain([&up["balancer"]])
        .filter_map(|p| p["pid"].as_u64())
        .collect();
    assert_eq!(pids.len(), 3, "{up:#}");
    // What it printed is true.
    let http = mooncake_chaos::cluster::http_client()?;
    for url in [&up["url"], &up["masters"][0]["http"], &up["clients"][0]["http"]] {
        let url = url.as_str().context("url")?;
        let path = if url == up["clients"][0]["http"] {
            "/metrics"
        } else {
            "/livez"
        };
        assert!(
            http.get(format!("{url}{path}"))
                .send()
                .await?
                .status()
                .is_success()
        );
    }
    assert!(!left_of(number, &dir)?.is_empty());

    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, signal)?;
    child.wait()?;
    let until = Instant::now() + LONG;
    while pids.iter().any(|&pid| alive(pid)) {
        ensure!(Instant::now() < until, "some of {pids:?} are still alive");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    if signal == rustix::process::Signal::KILL {
        // Nobody could clean up; the record says whose it was.
        assert!(left_of(number, &dir)?.contains(&"its record".to_owned()));
        let clean = Command::new(env!("CARGO_BIN_EXE_testbed"))
            .arg("clean")
            .output()?;
        let said = String::from_utf8(clean.stdout)?;
        assert!(
            clean.status.success() && said.contains(&number.to_string()),
            "{said}"
        );
    }
    assert_eq!(left_of(number, &dir)?, Vec::<String>::new());
    Ok(())
}

#[tokio::test]
async fn nothing_is_left_after_ctrl_c() -> Result<()> {
    ends_clean(rustix::process::Signal::INT).await
}

#[tokio::test]
async fn clean_removes_what_a_killed_testbed_left() -> Result<()> {
    ends_clean(rustix::process::Signal::KILL).await
}
