//! Runs a cluster in network namespaces for people to try things on.

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};
use comfy_table::{Table, presets};
use mooncake_chaos::{
    Process, Testbed, TestbedOptions,
    testbed::{BalancerKind, client_host, master_host, parse_rate, run},
};
use serde_json::{Value, json};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  testbed up --masters 3 --clients 8 --link 400mbit --serve /srv/models
  testbed up --json > bed.json &            for scripts: one JSON document, then it waits
  ip netns exec mt17-m1 ss -tn              what a host of run 17 sees
  ip netns exec mt17-m1 nft add table inet t; …   filter it by hand
  testbed clean                             remove what killed runs left

Everything is reachable from the machine it runs on. Ctrl-C (or SIGTERM) removes all of it.";

/// A whole cluster on this machine: masters, clients, load balancer and source, one network namespace each.
/// Needs root.
#[derive(Parser)]
#[command(name = "testbed", version, after_help = EXAMPLES, max_term_width = 110)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a cluster, print its addresses, wait for Ctrl-C
    Up(Up),
    /// Remove what runs that were killed have left
    Clean,
    /// List the runs of this machine
    List,
}

#[derive(Clone, Copy, ValueEnum)]
enum Balancer {
    Haproxy,
    Nginx,
    None,
}

#[derive(clap::Args)]
struct Up {
    /// Masters, all voters
    #[arg(long, default_value_t = 3)]
    masters: usize,
    /// Clients
    #[arg(long, default_value_t = 3)]
    clients: usize,
    /// Rate of every link but the balancer's, both ways, e.g. 400mbit; by default as fast as the machine
    #[arg(long, value_parser = parse_rate)]
    link: Option<u64>,
    /// In front of the masters: deploy/haproxy.cfg or deploy/nginx.conf
    #[arg(long, value_enum, default_value = "haproxy")]
    balancer: Balancer,
    /// Serve this folder over HTTP from the source host
    #[arg(long, value_name = "DIR")]
    serve: Option<PathBuf>,
    /// A folder or URL prefix that clients may read from, beside the source host; repeatable
    #[arg(long, value_name = "PREFIX")]
    allow_source: Vec<String>,
    /// A further argument of every master, e.g. --master-arg=--snapshot-every=1000; repeatable
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    master_arg: Vec<String>,
    /// A further argument of every client; repeatable
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    client_arg: Vec<String>,
    /// Print one JSON document instead of a table
    #[arg(long)]
    json: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    match Args::parse().command {
        Command::Up(up) => self::up(up).await,
        Command::Clean => {
            let removed = run::clean()?;
            match removed.is_empty() {
                true => println!("nothing to remove"),
                false => println!("removed the dead runs {removed:?}"),
            }
            Ok(())
        }
        Command::List => {
            for (number, owner) in run::runs()? {
                println!(
                    "run {number}: process {}, folder {}",
                    owner["pid"],
                    owner["dir"].as_str().unwrap_or("?")
                );
            }
            Ok(())
        }
    }
}

async fn up(up: Up) -> Result<()> {
    mooncake_chaos::process::build_product()?;
    let mut bed = Testbed::start(TestbedOptions {
        masters: up.masters,
        clients: up.clients,
        link: up.link,
        balancer: match up.balancer {
            Balancer::Haproxy => Some(BalancerKind::HaProxy),
            Balancer::Nginx => Some(BalancerKind::Nginx),
            Balancer::None => None,
        },
        allow_sources: up.allow_source,
        master_args: up.master_arg,
        client_args: up.client_arg,
        ..Default::default()
    })
    .await?;
    let source = match &up.serve {
        Some(folder) => Some(bed.serve(folder).await?.url.clone()),
        None => None,
    };
    let description = describe(&bed, source);
    match up.json {
        true => println!("{description}"),
        false => print(&bed, &description),
    }
    // SIGINT and SIGTERM end the process and remove the run.
    std::future::pending().await
}

fn describe(bed: &Testbed, source: Option<String>) -> Value {
    let cluster = &bed.cluster;
    let namespace = |host: &str| bed.network.host(host).map(|h| h.namespace.name().to_owned()).ok();
    let pid = |p: &Process| p.pid();
    let masters: Vec<_> = (0..cluster.masters.len())
        .map(|i| {
            json!({"id": i + 1, "host": master_host(i), "namespace": namespace(&master_host(i)),
                "pid": pid(&cluster.masters[i]), "http": cluster.endpoints[i],
                "rpc": cluster.rpc_addresses[i], "data_dir": cluster.data_dirs[i]})
        })
        .collect();
    let clients: Vec<_> = (0..cluster.clients.len())
        .map(|i| {
            json!({"node_id": cluster.nodes[i], "host": client_host(i), "namespace": namespace(&client_host(i)),
                "pid": pid(&cluster.clients[i]), "http": cluster.client_endpoints[i], "root": cluster.roots[i]})
        })
        .collect();
    json!({
        "run": bed.run().number(), "pid": std::process::id(), "dir": bed.dir(), "url": bed.url(),
        "balancer": bed.balancer.as_ref().map(|b| json!({"url": b.url, "statistics": b.statistics,
            "namespace": namespace("lb"), "pid": pid(&b.process)})),
        "source": source, "source_namespace": namespace("src"),
        "bridge_namespace": bed.network.bridge().name(),
        "masters": masters, "clients": clients,
    })
}

fn print(bed: &Testbed, description: &Value) {
    let text = |v: &Value| match v {
        Value::String(s) => s.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    };
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header([
        "what",
        "HTTP",
        "id or RPC",
        "namespace",
        "pid",
    ]);
    let balancer = &description["balancer"];
    if !balancer.is_null() {
        table.add_row([
            "balancer",
            &text(&balancer["url"]),
            "",
            &text(&balancer["namespace"]),
            &text(&balancer["pid"]),
        ]);
    }
    for m in description["masters"].as_array().into_iter().flatten() {
        let what = format!("master {}", m["id"]);
        table.add_row([
            &what,
            &text(&m["http"]),
            &text(&m["rpc"]),
            &text(&m["namespace"]),
            &text(&m["pid"]),
        ]);
    }
    for c in description["clients"].as_array().into_iter().flatten() {
        let what = format!("client {}", text(&c["host"]));
        table.add_row([
            &what,
            &text(&c["http"]),
            &text(&c["node_id"]),
            &text(&c["namespace"]),
            &text(&c["pid"]),
        ]);
    }
    let source = &description["source"];
    if !source.is_null() {
        let namespace = text(&description["source_namespace"]);
        table.add_row(["source", &text(source), "", &namespace, ""]);
    }
    println!("{table}");
    let run = bed.run();
    println!("Folder (logs, data): {}", bed.dir().display());
    println!("Callers:             {}/api/v1/nodes", bed.url());
    if let Some(page) = bed.balancer.as_ref().and_then(|b| b.statistics.as_ref()) {
        println!("Balancer's page:     {page}");
    }
    println!("On a host:           ip netns exec {} COMMAND", run.name("m1"));
    println!(
        "Pull a cable:        ip -n {} link set m1 down      (and up)",
        bed.network.bridge().name()
    );
    println!("Ctrl-C removes all of it.");
}
