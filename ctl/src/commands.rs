//! What each command does.

use crate::{
    api::Api,
    cli::{Cli, Command, DistributeArgs, Format, JobsCommand, ManifestCommand, OutputArgs},
    cluster,
    error::Failure,
    manifest, output, watch,
};
use mooncake_proto::{
    api::{
        CreateJobRequest, JobList, JobPolicy, JobSnapshot, JobStatus, ManifestSpec, ModelList, NodeList,
        NodeStatus, ProblemCode,
    },
    ids::{JobId, NodeId},
};
use std::path::Path;

/// Most entries asked for in one page.
const PAGE: u32 = 100;

const JOBS: [&str; 4] = ["api", "v1", "model-distribution", "jobs"];

/// Runs the command line.
pub async fn run(cli: Cli) -> Result<(), Failure> {
    let format = |args: &OutputArgs| if cli.json { Format::Json } else { args.output };
    let api = || Api::new(&cli.endpoints(), cli.timeout);
    match &cli.command {
        Command::Manifest(ManifestCommand::Create {
            folder,
            model,
            output,
        }) => {
            let spec = manifest::create(folder, model)?;
            let text = serde_json::to_string_pretty(&spec).expect("plain data always encodes") + "\n";
            match output {
                None => print!("{text}"),
                Some(path) => {
                    output::write_file(path, &text)?;
                    let files = spec.files.as_ref().map_or(0, Vec::len);
                    let size = output::bytes(spec.total_size_bytes.unwrap_or_default());
                    eprintln!("wrote {}: {files} files, {size}", path.display());
                }
            }
            Ok(())
        }
        Command::Distribute(args) => distribute(&api()?, args, format(&args.output)).await,
        Command::Jobs(JobsCommand::List {
            status,
            node,
            model_id,
            limit,
            output,
        }) => {
            let mut filter = Vec::new();
            filter.extend(status.map(|s| ("status", output::name(s))));
            filter.extend(node.as_ref().map(|n| ("node", n.to_string())));
            filter.extend(model_id.as_ref().map(|m| ("model_id", m.clone())));
            let list = jobs(&api()?, filter, *limit).await?;
            output::print(format(output), &list, output::job_list);
            Ok(())
        }
        Command::Jobs(JobsCommand::Get { job_id, output }) => {
            let job = watch::get(&api()?, job_id).await?;
            output::print(format(output), &job, output::job);
            Ok(())
        }
        Command::Jobs(JobsCommand::Watch { job_id, output }) => {
            watch::follow(&api()?, job_id, format(output)).await
        }
        Command::Jobs(JobsCommand::Cancel { job_id, output }) => {
            let job = cancel(&api()?, job_id).await?;
            output::print(format(output), &job, output::job);
            Ok(())
        }
        Command::Nodes(output) => {
            let list: NodeList = api()?.get(&["api", "v1", "nodes"], &[]).await?;
            output::print(format(output), &list, output::node_list);
            Ok(())
        }
        Command::Models(output) => {
            let list = models(&api()?).await?;
            output::print(format(output), &list, output::model_list);
            Ok(())
        }
        Command::Cluster(command) => cluster::run(command, api, cli.json).await,
    }
}

async fn distribute(api: &Api, args: &DistributeArgs, format: Format) -> Result<(), Failure> {
    let is_folder = args.what.is_dir();
    let mut request = if is_folder {
        CreateJobRequest::default()
    } else {
        let mut request = read_request(&args.what)?;
        rename(&mut request, args)?;
        request
    };
    let job_id = args.job_id.clone().or_else(|| request.job_id.take().map(JobId));
    // Before hours of hashing: is anybody there, and who?
    if args.all {
        match &job_id {
            Some(id) => repeat_all(api, &mut request, id).await?,
            None => name_targets(&mut request, &nodes_up(api).await?),
        }
    } else if !args.to.is_empty() {
        name_targets(&mut request, &args.to);
    }
    let first = request.target_nodes.as_ref().and_then(|t| t.first()).cloned();
    if first.is_none() {
        let message =
            "name the nodes that shall have it: --to NODE,… or --all (only a create request names its own)";
        return Err(Failure::Usage(message.into()));
    }
    let seed = args.seed.as_ref().map(NodeId::to_string);
    request.seed_node_id = seed.or(request.seed_node_id.take()).or(first);
    if is_folder {
        request.manifest = Some(manifest::create(&args.what, &args.model)?);
    }
    let job_id = job_id.unwrap_or_else(JobId::generate);
    request.job_id = Some(job_id.to_string());
    // What a request says itself is for the master to compare with its manifest.
    if request.model.is_none() {
        request.model = request.manifest.as_ref().map(manifest::model_of);
    }
    if args.max_attempts.is_some() || args.deadline.is_some() {
        let policy = request.policy.get_or_insert_with(JobPolicy::default);
        policy.max_attempts = args.max_attempts.or(policy.max_attempts);
        policy.deadline_s = args.deadline.map(|d| d.as_secs().max(1)).or(policy.deadline_s);
    }
    request.priority = args.priority.or(request.priority);
    let created: Result<JobSnapshot, Failure> = api.post(&JOBS, Some(&request)).await;
    let job = created.map_err(|failure| match failure {
        Failure::Unreachable(why) => Failure::Unreachable(format!(
            "{why}\nThe job may have been created all the same: look with `mooncakectl jobs get {job_id}`, or repeat \
             the command with --job-id {job_id}"
        )),
        other => other,
    })?;
    if !args.watch {
        output::print(format, &job, output::job);
        return if job.status == JobStatus::Failed {
            watch::outcome(&job)
        } else {
            Ok(())
        };
    }
    eprintln!(
        "job {} puts {} onto {} nodes",
        job.job_id,
        job.model_ref,
        job.target_nodes.len()
    );
    watch::follow(api, &job.job_id, format).await
}

/// `--all` under the id of a job that may exist: "all" are then the nodes that were up when it was created, or a
/// repeat after an outcome that is not known would be another request under the same id.
async fn repeat_all(api: &Api, request: &mut CreateJobRequest, id: &JobId) -> Result<(), Failure> {
    let job = match watch::get(api, id).await {
        Ok(job) => job,
        Err(Failure::Refused(problem)) if problem.code == ProblemCode::JobNotFound => {
            name_targets(request, &nodes_up(api).await?);
            return Ok(());
        }
        Err(other) => return Err(other),
    };
    eprintln!(
        "mooncakectl: job {id} exists: --all means its {} nodes",
        job.target_nodes.len()
    );
    name_targets(request, &job.target_nodes);
    request.seed_node_id = Some(job.seed_node_id.to_string());
    Ok(())
}

/// In place of those of the request, if it has any.
fn name_targets(request: &mut CreateJobRequest, targets: &[NodeId]) {
    request.target_nodes = Some(targets.iter().map(NodeId::to_string).collect());
    // It counted the others.
    request.replica_policy = None;
}

/// A manifest, or a whole create request.
fn read_request(path: &Path) -> Result<CreateJobRequest, Failure> {
    let wrong = |why: &dyn std::fmt::Display| {
        let hint = "name a folder, or a file made by `mooncakectl manifest create`";
        Failure::Usage(format!("cannot use {}: {why}; {hint}", path.display()))
    };
    let bytes = std::fs::read(path).map_err(|e| wrong(&e))?;
    let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| wrong(&e))?;
    if value.get("manifest").is_some() {
        return serde_json::from_value(value).map_err(|e| wrong(&e));
    }
    if value.get("files").is_none() {
        return Err(wrong(&"it holds neither `files` nor `manifest`"));
    }
    let manifest: ManifestSpec = serde_json::from_value(value).map_err(|e| wrong(&e))?;
    Ok(CreateJobRequest {
        manifest: Some(manifest),
        ..CreateJobRequest::default()
    })
}

/// The options that name the model hold for a manifest too; those about its files do not.
fn rename(request: &mut CreateJobRequest, args: &DistributeArgs) -> Result<(), Failure> {
    if args.model.url_prefix.is_some() || args.model.chunk_size.is_some() {
        let message =
            "--url-prefix and --chunk-size are for folders: a manifest has its URLs and chunks already";
        return Err(Failure::Usage(message.into()));
    }
    let name = &args.model;
    let set = |members: [&mut Option<String>; 4]| {
        let given = [&name.model_id, &name.revision, &name.format, &name.provider];
        for (given, member) in given.into_iter().zip(members) {
            if given.is_some() {
                member.clone_from(given);
            }
        }
    };
    if let Some(m) = &mut request.manifest {
        set([&mut m.model_id, &mut m.revision, &mut m.format, &mut m.provider]);
    }
    if let Some(m) = &mut request.model {
        set([&mut m.model_id, &mut m.revision, &mut m.format, &mut m.provider]);
    }
    Ok(())
}

async fn nodes_up(api: &Api) -> Result<Vec<NodeId>, Failure> {
    let list: NodeList = api.get(&["api", "v1", "nodes"], &[]).await?;
    let total = list.nodes.len();
    let up: Vec<NodeId> = list
        .nodes
        .into_iter()
        .filter(|n| n.status == NodeStatus::Up)
        .map(|n| n.node_id)
        .collect();
    if up.is_empty() {
        return Err(Failure::Usage(format!(
            "none of the cluster's {total} nodes is up: see `mooncakectl nodes`"
        )));
    }
    if up.len() < total {
        eprintln!(
            "mooncakectl: {} of {total} nodes are not up and are left out",
            total - up.len()
        );
    }
    Ok(up)
}

async fn jobs(api: &Api, filter: Vec<(&str, String)>, limit: u32) -> Result<JobList, Failure> {
    let mut all = JobList {
        jobs: Vec::new(),
        next_page_token: None,
    };
    loop {
        let left = limit - all.jobs.len() as u32;
        let mut query = filter.clone();
        query.push(("limit", left.min(PAGE).to_string()));
        query.extend(all.next_page_token.take().map(|t| ("page_token", t)));
        let page: JobList = api.get(&JOBS, &query).await?;
        all.jobs.extend(page.jobs);
        all.jobs.truncate(limit as usize);
        all.next_page_token = page.next_page_token;
        if all.next_page_token.is_none() || all.jobs.len() as u32 >= limit {
            return Ok(all);
        }
    }
}

async fn models(api: &Api) -> Result<ModelList, Failure> {
    let mut all = ModelList {
        models: Vec::new(),
        next_page_token: None,
    };
    loop {
        let mut query = vec![("limit", PAGE.to_string())];
        query.extend(all.next_page_token.take().map(|t| ("page_token", t)));
        let page: ModelList = api.get(&["api", "v1", "models"], &query).await?;
        all.models.extend(page.models);
        all.next_page_token = page.next_page_token;
        if all.next_page_token.is_none() {
            return Ok(all);
        }
    }
}

/// A job that was canceled before, perhaps by a try of this very command whose answer was lost, is no error.
async fn cancel(api: &Api, id: &JobId) -> Result<JobSnapshot, Failure> {
    let path = [&JOBS[..], &[id.as_str(), "cancel"]].concat();
    api.post(&path, None::<&()>).await
}
