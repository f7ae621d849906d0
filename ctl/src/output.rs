//! What people see: tables, numbers, colour, progress bars. Colour and bars only on a terminal; `NO_COLOR` is
//! honoured.

use crate::{cli::Format, error::Failure};
use comfy_table::{Attribute, Cell, Color, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use mooncake_proto::api::{
    ClusterStatus, JobList, JobSnapshot, JobStatus, MembershipAnswer, ModelList, NodeList, NodeStatus,
    PlacementState,
};
use mooncake_proto::backup::BackupInfo;
use serde::Serialize;
use std::io::{IsTerminal, Write};

/// A reader that has seen enough (`mooncakectl … | head`) ends this program silently, as it ends others.
pub fn die_on_closed_pipe() {
    std::panic::set_hook({
        let usual = std::panic::take_hook();
        Box::new(move |info| {
            let text = info.payload_as_str().unwrap_or_default();
            if text.starts_with("failed printing to stdout") && text.contains("Broken pipe") {
                std::process::exit(0);
            }
            usual(info);
        })
    });
}

fn no_color() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
}

/// Red where standard error is a terminal.
pub fn red_on_stderr(text: &str) -> String {
    if std::io::stderr().is_terminal() && !no_color() {
        format!("\x1b[31;1m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}

/// Whether somebody looks at standard error.
pub fn is_live() -> bool {
    std::io::stderr().is_terminal()
}

/// A bar over bytes; hidden where nobody looks.
pub fn bytes_bar(total: u64, what: &'static str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    let style = "{msg} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    bar.set_style(ProgressStyle::with_template(style).expect("a valid template"));
    bar.set_message(what);
    bar
}

/// Bytes for people, e.g. `1.5 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{n} B")
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// Whole per cent, 100 only when everything is there.
pub fn percent(done: u64, total: u64) -> u64 {
    if total == 0 {
        100
    } else {
        (u128::from(done.min(total)) * 100 / u128::from(total)) as u64
    }
}

/// The lower-case name that JSON has.
pub fn name(value: impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        other => format!("{other:?}"),
    }
}

/// Prints `value` as JSON or as what `table` makes of it.
pub fn print<T: Serialize>(format: Format, value: &T, table: impl FnOnce(&T) -> String) {
    let text = match format {
        Format::Json => serde_json::to_string_pretty(value).expect("plain data always encodes"),
        Format::Table => table(value),
    };
    println!("{}", text.trim_end());
}

/// Writes a file so that it is there as a whole or not at all.
pub fn write_file(path: &std::path::Path, text: &str) -> Result<(), Failure> {
    let cannot = |e: std::io::Error| Failure::Usage(format!("cannot write {}: {e}", path.display()));
    let name = path
        .file_name()
        .ok_or_else(|| Failure::Usage(format!("{} is no file name", path.display())))?;
    let partial = path.with_file_name(format!(
        ".{}.{}.partial",
        name.to_string_lossy(),
        std::process::id()
    ));
    let write = || {
        let mut file = std::fs::File::create(&partial)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&partial, path)
    };
    write().map_err(|e| {
        let _ = std::fs::remove_file(&partial);
        cannot(e)
    })
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    // Never wrapped: a path must stay in one piece, for eyes and for copying.
    table.set_content_arrangement(ContentArrangement::Disabled);
    if no_color() {
        table.force_no_tty();
    }
    table.set_header(header.iter().map(|h| Cell::new(h).add_attribute(Attribute::Bold)));
    table
}

fn render(mut table: Table) -> String {
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
        .lines()
        .map(|line| line.trim_end().to_owned() + "\n")
        .collect()
}

fn job_cell(status: JobStatus) -> Cell {
    let cell = Cell::new(name(status));
    match status {
        JobStatus::Completed => cell.fg(Color::Green),
        JobStatus::Failed => cell.fg(Color::Red),
        JobStatus::Canceled => cell.fg(Color::Yellow),
        _ => cell.fg(Color::Cyan),
    }
}

fn placement_cell(state: PlacementState) -> Cell {
    let cell = Cell::new(name(state));
    match state {
        PlacementState::Staged => cell.fg(Color::Green),
        PlacementState::Failed => cell.fg(Color::Red),
        PlacementState::Acquiring => cell.fg(Color::Cyan),
        PlacementState::Planned => cell,
    }
}

fn shown(text: Option<&str>) -> &str {
    text.unwrap_or("-")
}

/// `jobs list`.
pub fn job_list(list: &JobList) -> String {
    let mut t = table(&[
        "JOB", "STATUS", "PRIORITY", "MODEL", "STAGED", "BYTES", "CREATED", "ERROR",
    ]);
    for job in &list.jobs {
        let p = &job.progress;
        t.add_row(vec![
            Cell::new(&job.job_id),
            job_cell(job.status),
            Cell::new(job.priority),
            Cell::new(&job.model_ref),
            Cell::new(format!("{}/{}", p.placements_staged, p.placements_total)),
            Cell::new(format!("{}%", percent(p.bytes_staged, p.bytes_total))),
            Cell::new(&job.created_at),
            Cell::new(shown(job.last_error.as_deref())),
        ]);
    }
    let more = list
        .next_page_token
        .is_some()
        .then_some("(there are more: raise --limit)\n");
    if list.jobs.is_empty() && more.is_none() {
        return "no jobs".into();
    }
    render(t) + more.unwrap_or_default()
}

/// `jobs get`, and the end of a watch.
pub fn job(job: &JobSnapshot) -> String {
    let p = &job.progress;
    let mut text = format!(
        "job     {}\nstatus  {}\nmodel   {}\nseed    {}\nbytes   {} of {} ({}%), {}/s\n",
        job.job_id,
        name(job.status),
        job.model_ref,
        job.seed_node_id,
        bytes(p.bytes_staged),
        bytes(p.bytes_total),
        percent(p.bytes_staged, p.bytes_total),
        bytes(p.bytes_per_second),
    );
    for (status, at) in &job.transitions {
        text.push_str(&format!("        {at} {}\n", name(status)));
    }
    if job.priority != 0 {
        text.push_str(&format!("priority {}\n", job.priority));
    }
    if let Some(error) = &job.last_error {
        text.push_str(&format!("error   {error}\n"));
    }
    if let Some(what) = &job.waiting_for {
        text.push_str(&format!("waits   {what}\n"));
    }
    for warning in &job.warnings {
        let at = warning
            .pointer
            .as_deref()
            .map(|p| format!(" {p}:"))
            .unwrap_or_default();
        text.push_str(&format!("warning{at} {}\n", warning.detail));
    }
    let mut t = table(&[
        "NODE", "STATE", "BYTES", "VERIFIED", "ATTEMPT", "BY", "PATH", "ERROR",
    ]);
    for placement in &job.placements {
        let remark = if placement.requested { "" } else { " (seed only)" };
        t.add_row(vec![
            Cell::new(format!("{}{remark}", placement.node_id)),
            placement_cell(placement.state),
            Cell::new(bytes(placement.staged_bytes)),
            Cell::new(if placement.checksum_verified { "yes" } else { "no" }),
            Cell::new(placement.attempt),
            Cell::new(match placement.transports.is_empty() {
                true => "-".into(),
                false => placement.transports.join(","),
            }),
            Cell::new(shown(placement.local_path.as_deref())),
            Cell::new(shown(placement.last_error.as_deref())),
        ]);
    }
    text + "\n" + &render(t)
}

/// `nodes`.
pub fn node_list(list: &NodeList) -> String {
    let mut t = table(&[
        "NODE",
        "STATUS",
        "SINCE",
        "FREE",
        "CAPACITY",
        "MODELS",
        "TRANSPORTS",
        "LABELS",
        "VERSION",
    ]);
    for node in &list.nodes {
        let status = Cell::new(name(node.status)).fg(match node.status {
            NodeStatus::Up => Color::Green,
            NodeStatus::Suspected => Color::Yellow,
            NodeStatus::Down => Color::Red,
        });
        let labels: Vec<_> = node.labels.iter().map(|(k, v)| format!("{k}={v}")).collect();
        t.add_row(vec![
            Cell::new(&node.node_id),
            status,
            Cell::new(&node.since),
            Cell::new(bytes(node.free_bytes)),
            Cell::new(bytes(node.capacity_bytes)),
            Cell::new(node.staged_models),
            Cell::new(node.transports.join(",")),
            Cell::new(if labels.is_empty() {
                "-".into()
            } else {
                labels.join(",")
            }),
            Cell::new(&node.version),
        ]);
    }
    if list.nodes.is_empty() {
        "no nodes: start mooncake_client on some".into()
    } else {
        render(t)
    }
}

/// `models`.
pub fn model_list(list: &ModelList) -> String {
    let mut t = table(&[
        "MODEL",
        "REVISION",
        "FORMAT",
        "PROVIDER",
        "SIZE",
        "FILES",
        "SEALED",
        "STAGED ON",
    ]);
    for model in &list.models {
        let staged: Vec<_> = model
            .placements
            .iter()
            .filter(|p| p.state == PlacementState::Staged)
            .map(|p| p.node_id.as_str())
            .collect();
        t.add_row(vec![
            Cell::new(&model.model_ref.model_id),
            Cell::new(&model.model_ref.revision),
            Cell::new(&model.model_ref.format),
            Cell::new(&model.model_ref.provider),
            Cell::new(bytes(model.total_size_bytes)),
            Cell::new(model.files),
            Cell::new(if model.sealed { "yes" } else { "no" }),
            Cell::new(if staged.is_empty() {
                "-".into()
            } else {
                staged.join(",")
            }),
        ]);
    }
    if list.models.is_empty() {
        "no models".into()
    } else {
        render(t)
    }
}

/// `cluster status`.
pub fn cluster(status: &ClusterStatus) -> String {
    let leader = status
        .leader_id
        .map_or_else(|| "none".to_owned(), |id| id.to_string());
    let text = format!(
        "cluster  {}\nleader   {leader}\nterm     {}\napplied  {} of {}, the last of term {} (on master {})\nversion  {}\nepoch    {}\n",
        status.cluster_id,
        status.term,
        status.applied_index,
        status.last_log_index,
        status.last_log_term,
        status.served_by,
        status.cluster_version,
        status.recovery_epoch,
    );
    let mut t = table(&["MASTER", "ROLE", "HTTP", "RPC", "LAG", "SILENT", "DISK"]);
    for member in &status.members {
        t.add_row(vec![
            Cell::new(member.id),
            Cell::new(&member.role),
            Cell::new(&member.http_address),
            Cell::new(&member.rpc_address),
            Cell::new(member.lag.map_or_else(|| "-".to_owned(), |lag| lag.to_string())),
            silence_cell(member.silent_ms),
            Cell::new(&member.disk_id),
        ]);
    }
    text + "\n" + &render(t)
}

/// A second is nothing: it is many heartbeats, but a busy machine is late now and then.
fn silence_cell(silent_ms: Option<u64>) -> Cell {
    match silent_ms {
        None => Cell::new("-"),
        Some(ms) if ms < 1000 => Cell::new(format!("{ms} ms")),
        Some(ms) => Cell::new(format!("{} s", ms / 1000)).fg(Color::Red),
    }
}

/// `cluster snapshot status`, and the end of `save`.
pub fn backup(info: &BackupInfo) -> String {
    format!(
        "cluster   {}\ntaken     {} by master {} ({})\nlog       index {}, term {}\njobs      {} ({} not ended)\n\
         models    {}\nnodes     {}\nversion   {}\nepoch     {}\nmasters   {}\n",
        info.cluster_id,
        info.taken_at,
        info.taken_by,
        info.software,
        info.index,
        info.term,
        info.jobs,
        info.live_jobs,
        info.models,
        info.nodes,
        info.cluster_version,
        info.recovery_epoch,
        info.members.join(", "),
    )
}

/// The end of every change of the masters.
pub fn membership(answer: &MembershipAnswer) -> String {
    format!("{}\n\n{}", answer.detail, cluster(&answer.cluster))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(
            [0, 1023, 1024, 1536 << 20].map(bytes),
            ["0 B", "1023 B", "1.0 KiB", "1.5 GiB"]
        );
        assert_eq!(bytes(u64::MAX), "16384.0 PiB");
        assert_eq!(percent(999, 1000), 99, "100 % is all of it");
        assert_eq!((percent(0, 0), percent(5, 5), percent(7, 5)), (100, 100, 100));
        assert_eq!(percent(u64::MAX / 2, u64::MAX), 49);
        assert_eq!(name(JobStatus::Replicating), "replicating");
    }
}
