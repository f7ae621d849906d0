//! The rules of one path and of one source.

use super::super::{MAX_PATH_BYTES, MAX_PATH_COMPONENT_BYTES, MAX_URL_BYTES};
use crate::text::cut;

/// Deepest path: bounds the work of comparing every folder of every path with every file.
const MAX_PATH_COMPONENTS: usize = 64;

/// A path that stays inside its folder on any POSIX filesystem.
pub(super) fn check_path(path: &str) -> Result<(), (&'static str, String)> {
    if path.is_empty() {
        return Err(("empty_path", "must not be empty".into()));
    }
    if path.starts_with('/') {
        return Err((
            "absolute_path",
            format!(
                "'{}' is absolute: write it relative to the model's folder",
                cut(path)
            ),
        ));
    }
    if path.len() > MAX_PATH_BYTES {
        return Err((
            "limit_exceeded",
            format!("{} bytes, the limit is {MAX_PATH_BYTES}", path.len()),
        ));
    }
    if let Some(bad) = path.chars().find(|c| c.is_control()) {
        return Err((
            "invalid_character",
            format!("holds the control character {bad:?}"),
        ));
    }
    if path.split('/').count() > MAX_PATH_COMPONENTS {
        let detail = format!("more than {MAX_PATH_COMPONENTS} components");
        return Err(("limit_exceeded", detail));
    }
    for component in path.split('/') {
        match component {
            "" => {
                return Err((
                    "empty_component",
                    format!("'{}' has an empty component ('//' or a final '/')", cut(path)),
                ));
            }
            "." | ".." => {
                return Err((
                    "path_escapes",
                    format!(
                        "'{}' has the component '{component}', which may leave the folder",
                        cut(path)
                    ),
                ));
            }
            c if c.len() > MAX_PATH_COMPONENT_BYTES => {
                return Err((
                    "limit_exceeded",
                    format!(
                        "a component has {} bytes, the limit is {MAX_PATH_COMPONENT_BYTES}",
                        c.len()
                    ),
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// A source this version can read, without credentials in it. Never repeats the URL: it may be signed.
pub(super) fn check_source(text: &str) -> Result<(), (&'static str, String)> {
    if text.len() > MAX_URL_BYTES {
        return Err((
            "limit_exceeded",
            format!("{} bytes, the limit is {MAX_URL_BYTES}", text.len()),
        ));
    }
    if text.starts_with('/') {
        return Ok(());
    }
    let forms = "use file:///absolute/path, /absolute/path, http:// or https://";
    let url = url::Url::parse(text).map_err(|e| ("invalid_url", format!("not a URL ({e}): {forms}")))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err((
            "credentials_in_url",
            "user-info in a URL is refused: it would be stored and shown".into(),
        ));
    }
    match url.scheme() {
        "file" if url.host_str().is_none_or(|h| h.is_empty() || h == "localhost") => Ok(()),
        "file" => Err((
            "invalid_url",
            "a file:// URL names no host: write file:///absolute/path".into(),
        )),
        "http" | "https" => Ok(()),
        other => Err((
            "unsupported_scheme",
            format!("'{}:' is not supported: {forms}", cut(other)),
        )),
    }
}
