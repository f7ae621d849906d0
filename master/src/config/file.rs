//! The configuration file: its settings become arguments that stand before those of the command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::CommandFactory;

use super::ENV_PREFIX;
use super::flags::Flags;

/// Largest configuration file.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// `--rpc_port=1` → `--rpc-port=1`; values are left alone.
pub(crate) fn hyphens(argument: OsString) -> OsString {
    let Some(text) = argument.to_str().filter(|text| text.starts_with("--")) else {
        return argument;
    };
    match text.split_once('=') {
        Some((name, value)) => format!("{}={value}", name.replace('_', "-")).into(),
        None => text.replace('_', "-").into(),
    }
}

/// The file has to be known before the flags are parsed, since it supplies some of them.
pub(super) fn config_file(arguments: &[OsString]) -> Option<PathBuf> {
    let mut found = None;
    let mut arguments = arguments.iter().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            Some("--") => break,
            Some("--config") => found = arguments.next().map(PathBuf::from),
            Some(text) => found = text.strip_prefix("--config=").map(PathBuf::from).or(found),
            None => {}
        }
    }
    found.or_else(|| std::env::var_os(format!("{ENV_PREFIX}CONFIG")).map(PathBuf::from))
}

/// The file's settings as arguments, except those that the environment sets.
pub(super) fn read_file(path: &Path) -> Result<Vec<OsString>, String> {
    let size = std::fs::metadata(path).map_err(|error| error.to_string())?.len();
    if size > MAX_FILE_BYTES {
        return Err(format!("it has {size} bytes, the limit is {MAX_FILE_BYTES}"));
    }
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let is_yaml = path
        .extension()
        .is_some_and(|ext| ext.eq_ignore_ascii_case("yaml") || ext.eq_ignore_ascii_case("yml"));
    file_arguments(&text, is_yaml, |name| std::env::var_os(name).is_some())
}

pub(super) fn file_arguments(
    text: &str,
    is_yaml: bool,
    in_environment: impl Fn(&str) -> bool,
) -> Result<Vec<OsString>, String> {
    let values: serde_json::Value = match is_yaml {
        true => serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?,
        false => toml::from_str(text).map_err(|error| error.to_string())?,
    };
    let values = match values {
        serde_json::Value::Object(values) => values,
        serde_json::Value::Null => return Ok(Vec::new()),
        _ => return Err("it must be a list of names and values, e.g. node_id: 1".into()),
    };
    let command = Flags::command();
    let names: Vec<_> = command
        .get_arguments()
        .filter_map(|argument| argument.get_long())
        .collect();
    let mut arguments = Vec::new();
    for (key, value) in values {
        let name = key.replace('_', "-");
        if name == "config" || !(names.contains(&name.as_str()) || name == "metrics-port") {
            return Err(format!(
                "there is no setting '{key}'; see mooncake_master --help for the names"
            ));
        }
        if in_environment(&format!("{ENV_PREFIX}{}", name.replace('-', "_").to_uppercase())) {
            continue;
        }
        let value = plain(&value).ok_or_else(|| {
            format!("the value of '{key}' is neither a text nor a number nor true or false")
        })?;
        arguments.push(format!("--{name}={value}").into());
    }
    Ok(arguments)
}

/// Scalars as they are; lists and tables (for `initial_cluster`) in the flag's own form.
fn plain(value: &serde_json::Value) -> Option<String> {
    use serde_json::Value;
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(flag) => Some(flag.to_string()),
        Value::Number(number) => Some(number.to_string()),
        Value::Array(items) => items
            .iter()
            .map(plain)
            .collect::<Option<Vec<_>>>()
            .map(|items| items.join(",")),
        Value::Object(items) => items
            .iter()
            .map(|(key, value)| plain(value).map(|value| format!("{key}={value}")))
            .collect::<Option<Vec<_>>>()
            .map(|items| items.join(",")),
        Value::Null => None,
    }
}
