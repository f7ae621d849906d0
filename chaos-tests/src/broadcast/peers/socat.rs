//! A chain: each follower writes what it receives with tee and passes it on at once. Whatever follows a chain and does
//! more (checks, recovery) can only be slower, so this is the floor.

use super::{Delivered, Delivery, Tool, address, all, on_client, strings, target};
use crate::testbed::Testbed;
use anyhow::Result;
use std::time::Instant;
use tokio::task::JoinSet;

const PORT: u16 = 7000;

pub(super) async fn deliver(bed: &mut Testbed, delivery: &Delivery<'_>) -> Result<Delivered> {
    let last = delivery.followers;
    let mut links = Vec::new();
    let mut targets = Vec::new();
    // From the end, so that each finds the next one listening.
    for client in (1..=last).rev() {
        let target = target(bed, client, "socat")?;
        let listen = format!("TCP4-LISTEN:{PORT},reuseaddr");
        if client == last {
            let args = socat(&listen, &format!("CREATE:{}", target.display()));
            let mut receives = Tool::start(on_client(bed, client, "socat", "socat", args)?)?;
            receives.listens(PORT).await?;
            links.push((client, receives, Vec::new()));
        } else {
            let mut start = on_client(bed, client, "socat-in", "socat", socat(&listen, "STDOUT"))?;
            start.piped = true;
            let mut receives = Tool::start(start)?;
            receives.listens(PORT).await?;
            let args = vec![target.display().to_string()];
            let mut start = on_client(bed, client, "tee", "tee", args)?;
            start.stdin = receives.stdout()?.try_into()?;
            start.piped = true;
            let mut tee = Tool::start(start)?;
            let next = format!("TCP4:{}:{PORT}", address(bed, client + 1)?);
            let mut start = on_client(bed, client, "socat-out", "socat", socat("STDIN", &next))?;
            start.stdin = tee.stdout()?.try_into()?;
            let passes_on = Tool::start(start)?;
            links.push((client, tee, vec![receives, passes_on]));
        }
        targets.push(target);
    }
    targets.reverse();

    let from = format!("OPEN:{},rdonly", delivery.file.display());
    let to = format!("TCP4:{}:{PORT}", address(bed, 1)?);
    let start = on_client(bed, 0, "socat", "socat", socat(&from, &to))?;
    let began = Instant::now();
    let mut seed = Tool::start(start)?;
    let mut waits = JoinSet::new();
    for (client, mut writes, others) in links {
        waits.spawn(async move {
            writes.finished().await?;
            let at = Instant::now();
            for mut other in others {
                other.finished().await?;
            }
            Ok((client - 1, at))
        });
    }
    let received = all(waits, began, targets).await?;
    seed.finished().await?;
    Ok(received)
}

/// One way, in pieces as large as a pipe takes several of.
fn socat(from: &str, to: &str) -> Vec<String> {
    let mut args = strings(&["-u", "-b", "65536"]);
    args.extend([from.to_owned(), to.to_owned()]);
    args
}
