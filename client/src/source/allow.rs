//! What this node may read from outside, and how a source is named to people.
//!
//! Guaranteed: a path counts as inside a folder only after every symbolic link in it was resolved, compared
//! component by component; a URL only if scheme, host and port are equal and its path continues the prefix at
//! a `/`. The default list is empty: nothing may be read. No query string, fragment or user-info is ever part
//! of a message.
//!
//! Not guaranteed: anything about what a web server hands out below an allowed prefix. Redirects have rules
//! of their own, see [`super::http`].

use crate::task::TaskFailure;
use std::{
    fmt,
    path::{Component, Path, PathBuf},
};
use url::Url;

/// The flag that fills the list; every refusal names it.
pub const ALLOW_FLAG: &str = "--allow-source";

/// Prefixes below which sources may be read; empty unless the operator says otherwise.
#[derive(Clone, Debug, Default)]
pub struct AllowList {
    entries: Vec<Entry>,
}

#[derive(Clone, Debug)]
enum Entry {
    Folder(PathBuf),
    Prefix(Url),
}

/// Where a file's bytes come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// An absolute path, as given (not yet resolved).
    Path(PathBuf),
    /// `http` or `https`.
    Url(Url),
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Url(url) => f.write_str(&redact(url)),
        }
    }
}

/// A URL as people and logs may see it: without user-info, the query and fragment as `?…`.
pub fn redact(url: &Url) -> String {
    let mut shown = url.clone();
    // These fail only for URLs that cannot have them.
    let _ = shown.set_username("");
    let _ = shown.set_password(None);
    let hidden = url.query().is_some() || url.fragment().is_some();
    shown.set_query(None);
    shown.set_fragment(None);
    if hidden {
        format!("{shown}?…")
    } else {
        shown.into()
    }
}

impl Location {
    /// Reads `file://…`, an absolute path or `http(s)://…`. The error never repeats the text: it may be signed.
    pub fn parse(text: &str) -> Result<Self, TaskFailure> {
        let invalid = |why: String| {
            let forms = "use file:///absolute/path, /absolute/path, http://… or https://…";
            TaskFailure::permanent(
                "source_invalid",
                format!("the download_url cannot be used: {why}; {forms}"),
            )
        };
        if text.is_empty() {
            return Err(invalid("it is missing".into()));
        }
        if text.starts_with('/') {
            return Ok(Self::Path(text.into()));
        }
        let url = Url::parse(text).map_err(|e| invalid(format!("it is not a URL ({e})")))?;
        if !url.username().is_empty() || url.password().is_some() {
            return Err(invalid(
                "it holds a user name or password, which would be stored and shown".into(),
            ));
        }
        match url.scheme() {
            "http" | "https" => Ok(Self::Url(url)),
            "file" => match url.to_file_path() {
                Ok(path) => Ok(Self::Path(path)),
                Err(()) => Err(invalid("a file:// URL names no host".into())),
            },
            other => Err(invalid(format!("'{other}:' is not supported"))),
        }
    }
}

impl AllowList {
    /// Reads the flag's values: a folder (or `file://` URL of one) or an `http(s)://` prefix. A folder need
    /// not exist yet.
    pub fn parse<S: AsRef<str>>(prefixes: &[S]) -> Result<Self, String> {
        let entries = prefixes
            .iter()
            .map(|p| Entry::parse(p.as_ref()))
            .collect::<Result<_, _>>()?;
        Ok(Self { entries })
    }

    /// Whether nothing is allowed.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether `url` may be read.
    pub fn allows_url(&self, url: &Url) -> bool {
        self.entries
            .iter()
            .any(|e| matches!(e, Entry::Prefix(prefix) if url_below(prefix, url)))
    }

    /// Whether `resolved`, which is `written` with every symbolic link resolved, may be read. Looks at the
    /// disk where it must, since the allowed folder may itself be reached through a link: only at folders that
    /// `written` goes through, and at others only if that was not enough. One allowed folder on a share that
    /// hangs so does not stop what lies elsewhere.
    pub fn allows_resolved(&self, written: &Path, resolved: &Path) -> bool {
        let folders = || {
            self.entries.iter().filter_map(|e| match e {
                Entry::Folder(folder) => Some(folder),
                Entry::Prefix(_) => None,
            })
        };
        let leads_there = |folder: &PathBuf| {
            folder
                .canonicalize()
                .is_ok_and(|folder| resolved.starts_with(folder))
        };
        // A folder that is part of a resolved path holds no link itself.
        folders().any(|f| resolved.starts_with(f))
            || folders().filter(|f| written.starts_with(f)).any(leads_there)
            || folders().filter(|f| !written.starts_with(f)).any(leads_there)
    }

    /// Whether `path` as written lies inside an allowed folder as written: what may be said about a path that
    /// does not exist.
    pub fn allows_as_written(&self, path: &Path) -> bool {
        let plain = !path.components().any(|c| matches!(c, Component::ParentDir));
        plain
            && self
                .entries
                .iter()
                .any(|e| matches!(e, Entry::Folder(folder) if path.starts_with(folder)))
    }

    /// The refusal of `location`.
    pub fn refusal(&self, file: &str, location: &Location) -> TaskFailure {
        let allowed = match self.entries.as_slice() {
            [] => "nothing is allowed now".to_owned(),
            entries => {
                let list: Vec<_> = entries.iter().take(8).map(Entry::to_string).collect();
                let more = if entries.len() > 8 { ", …" } else { "" };
                format!("allowed now: {}{more}", list.join(", "))
            }
        };
        TaskFailure::permanent(
            "source_not_allowed",
            format!(
                "this node may not read {location} (the source of '{file}'): start its client with {ALLOW_FLAG} \
                 and a folder or URL prefix that covers it ({allowed}), or name a source it may read"
            ),
        )
    }
}

impl Entry {
    fn parse(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| format!("{ALLOW_FLAG} '{text}': {why}");
        if text.is_empty() {
            return Err(wrong("is empty; use / to allow every local file"));
        }
        if !text.contains("://") {
            let folder = std::path::absolute(text).map_err(|e| wrong(&e.to_string()))?;
            if folder.components().any(|c| matches!(c, Component::ParentDir)) {
                return Err(wrong("holds '..': write the folder itself"));
            }
            return Ok(Self::Folder(folder));
        }
        let url = Url::parse(text).map_err(|e| wrong(&e.to_string()))?;
        if url.query().is_some() || url.fragment().is_some() {
            return Err(wrong("a prefix has no query and no fragment"));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(wrong("user names and passwords are not supported in URLs"));
        }
        match url.scheme() {
            "http" | "https" => Ok(Self::Prefix(url)),
            "file" => url
                .to_file_path()
                .map(Self::Folder)
                .map_err(|()| wrong("a file:// URL names no host")),
            other => Err(wrong(&format!(
                "'{other}:' is not supported; use a folder, http:// or https://"
            ))),
        }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(folder) => write!(f, "{}", folder.display()),
            Self::Prefix(url) => f.write_str(url.as_str()),
        }
    }
}

/// Whether `url` is `prefix` or below it; with credentials in it, it is not: an entry has none. Dot segments (encoded ones too) were resolved by the URL parser.
fn url_below(prefix: &Url, url: &Url) -> bool {
    let plain = url.username().is_empty() && url.password().is_none();
    let origin = prefix.scheme() == url.scheme()
        && prefix.host() == url.host()
        && prefix.port_or_known_default() == url.port_or_known_default();
    let (Some(base), Some(path)) = (prefix.path_segments(), url.path_segments()) else {
        return false;
    };
    // "/models/" allows what "/models" allows.
    let base: Vec<_> = base.collect();
    let base = base.strip_suffix(&[""]).unwrap_or(&base);
    let path: Vec<_> = path.collect();
    // A server that decodes %2F after it has split the path would climb out of the prefix.
    let climbs = path.iter().any(|segment| {
        let lower = segment
            .to_ascii_lowercase()
            .replace("%2f", "/")
            .replace("%5c", "/")
            .replace("%2e", ".");
        lower.contains(['/', '\\']) && lower.split(['/', '\\']).any(|part| part == "..")
    });
    plain && origin && !climbs && path.starts_with(base)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    #[test]
    fn urls_below_a_prefix() {
        let list = AllowList::parse(&["https://host/models/", "http://[::1]:8080"]).unwrap();
        for good in [
            "https://host/models/a/b",
            "https://HOST:443/models/a?sig=1",
            "https://host/models",
            "http://[::1]:8080/x",
        ] {
            assert!(list.allows_url(&url(good)), "{good}");
        }
        for bad in [
            "https://host/models-other/a",
            "https://host/model",
            "http://host/models/a",
            "https://host:444/models/a",
            "https://host.evil/models/a",
            "https://host@evil/models/a",
            "https://host/models/../secret",
            "https://host/models/%2e%2e/secret",
            "https://host/models/%2e%2e%2fsecret",
            "https://host/models/x%2F..%2F..%2Fsecret",
            "https://host/models/..%5Csecret",
            "http://[::1]/x",
            "https://user@host/models/a",
            "https://user:secret@host/models/a",
        ] {
            assert!(!list.allows_url(&url(bad)), "{bad}");
        }
        assert!(!AllowList::default().allows_url(&url("https://host/")));
    }

    #[test]
    fn folders_are_compared_by_component_and_after_links() {
        let tmp = tempfile::tempdir().unwrap();
        let root = tmp.path().canonicalize().unwrap();
        let (inside, sibling) = (root.join("models"), root.join("models-private"));
        std::fs::create_dir_all(&inside).unwrap();
        std::fs::create_dir_all(&sibling).unwrap();
        std::fs::write(inside.join("a"), "a").unwrap();
        std::fs::write(sibling.join("b"), "b").unwrap();
        std::os::unix::fs::symlink(&sibling, inside.join("link")).unwrap();
        std::os::unix::fs::symlink(&inside, root.join("alias")).unwrap();
        let list = AllowList::parse(&[root.join("alias").to_str().unwrap()]).unwrap();
        let alias = root.join("alias");
        for written in [alias.join("a"), inside.join("a"), root.join("any/other/a")] {
            assert!(
                list.allows_resolved(&written, &inside.join("a")),
                "the allowed folder may be a link itself"
            );
        }
        assert!(
            !list.allows_resolved(&sibling.join("b"), &sibling.join("b")),
            "a longer name is not inside"
        );
        assert!(
            !list.allows_resolved(&alias.join("link/b"), &sibling.join("b")),
            "links do not lead out"
        );
        assert!(!list.allows_as_written(&root.join("alias/../models-private/b")));
        assert!(!AllowList::default().allows_resolved(&inside.join("a"), &inside.join("a")));
    }

    #[test]
    fn locations() {
        let path = |p: &str| Ok(Location::Path(p.into()));
        assert_eq!(Location::parse("/a/b c"), path("/a/b c"));
        assert_eq!(Location::parse("file:///a/b%20c%23"), path("/a/b c#"));
        assert_eq!(Location::parse("file://localhost/a"), path("/a"));
        assert!(matches!(
            Location::parse("https://h/x?sig=s"),
            Ok(Location::Url(_))
        ));
        for bad in [
            "",
            "a/b",
            "file://other/a",
            "ftp://h/x",
            "https://user:secret@h/x",
        ] {
            let failure = Location::parse(bad).unwrap_err();
            assert_eq!(
                (failure.code.as_str(), failure.retryable),
                ("source_invalid", false),
                "{bad}"
            );
            assert!(!failure.message.contains("secret"));
        }
    }

    #[test]
    fn refusals_name_the_flag_and_hide_the_query() {
        let list = AllowList::parse(&["/srv/models"]).unwrap();
        let location = Location::parse("https://h/m/x.bin?X-Signature=s3cret#frag").unwrap();
        let failure = list.refusal("x.bin", &location);
        assert_eq!(failure.code, "source_not_allowed");
        for part in ["--allow-source", "https://h/m/x.bin?…", "/srv/models", "'x.bin'"] {
            assert!(
                failure.message.contains(part),
                "{part} is missing in: {}",
                failure.message
            );
        }
        assert!(!failure.message.contains("s3cret") && !failure.message.contains("frag"));
        assert!(
            AllowList::default()
                .refusal("x", &location)
                .message
                .contains("nothing is allowed now")
        );
    }

    #[test]
    fn flags_that_make_no_sense() {
        for bad in ["", "ftp://h/", "https://h/x?q=1", "https://u:p@h/", "/a/../b"] {
            assert!(
                AllowList::parse(&[bad]).unwrap_err().contains("--allow-source"),
                "{bad}"
            );
        }
        assert!(AllowList::parse(&["/", "file:///srv/x", "http://h"]).is_ok());
    }
}
