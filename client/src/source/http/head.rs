//! What the head of an answer says. Pure.

use reqwest::header::{
    CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, HeaderName, HeaderValue, LAST_MODIFIED,
};
use std::time::{Duration, SystemTime};

/// A `Content-Range: bytes …` header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ContentRange {
    /// First and last byte; none in `bytes */total`.
    pub(super) range: Option<(u64, u64)>,
    /// None for `*`.
    pub(super) total: Option<u64>,
}

impl ContentRange {
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        Self::parse(headers.get(CONTENT_RANGE)?.to_str().ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let (unit, rest) = text.trim().split_once(' ')?;
        if !unit.eq_ignore_ascii_case("bytes") {
            return None;
        }
        let (range, total) = rest.trim().split_once('/')?;
        let total = match total {
            "*" => None,
            n => Some(number(n)?),
        };
        let range = match range {
            "*" => None,
            r => {
                let (first, last) = r.split_once('-')?;
                Some((number(first)?, number(last)?))
            }
        };
        Some(Self { range, total })
    }
}

/// Digits only: `parse` alone would take a sign.
fn number(text: &str) -> Option<u64> {
    text.bytes()
        .all(|b| b.is_ascii_digit())
        .then(|| text.parse().ok())?
}

pub(super) fn content_length(headers: &HeaderMap) -> Option<u64> {
    number(headers.get(CONTENT_LENGTH)?.to_str().ok()?)
}

/// `Retry-After`, in seconds or as a date; none if it is absent or makes no sense.
pub(super) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(reqwest::header::RETRY_AFTER)?.to_str().ok()?.trim();
    match number(text) {
        Some(seconds) => Some(Duration::from_secs(seconds)),
        None => Some(
            httpdate::parse_http_date(text)
                .ok()?
                .duration_since(now)
                .unwrap_or_default(),
        ),
    }
}

/// Which version of the source an answer belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Version {
    etag: Option<HeaderValue>,
    last_modified: Option<HeaderValue>,
}

impl Version {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        Self {
            etag: headers.get(ETAG).cloned(),
            last_modified: headers.get(LAST_MODIFIED).cloned(),
        }
    }

    /// The condition under which a further request may be answered. Weak tags never match `If-Match`.
    pub(super) fn condition(&self) -> Option<(HeaderName, HeaderValue)> {
        use reqwest::header::{IF_MATCH, IF_UNMODIFIED_SINCE};
        let strong = self.etag.as_ref().filter(|tag| tag.as_bytes().starts_with(b"\""));
        let tag = strong.map(|tag| (IF_MATCH, tag.clone()));
        tag.or_else(|| Some((IF_UNMODIFIED_SINCE, self.last_modified.clone()?)))
    }

    /// How `later` shows that the source changed: servers may ignore the condition. By the tags where both
    /// have one, else by the dates where both have one.
    pub(super) fn changed(&self, later: &Self) -> Option<String> {
        let show = |v: &HeaderValue| String::from_utf8_lossy(v.as_bytes()).into_owned();
        let opaque = |v: &HeaderValue| {
            let bytes = v.as_bytes();
            bytes.strip_prefix(b"W/").unwrap_or(bytes).to_vec()
        };
        match (&self.etag, &later.etag, &self.last_modified, &later.last_modified) {
            (Some(a), Some(b), ..) => {
                (opaque(a) != opaque(b)).then(|| format!("its ETag was {} and is {} now", show(a), show(b)))
            }
            (.., Some(a), Some(b)) => {
                (a != b).then(|| format!("its Last-Modified was {} and is {} now", show(a), show(b)))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        list.iter()
            .map(|(k, v)| (HeaderName::from_static(k), v.parse().unwrap()))
            .collect()
    }

    #[test]
    fn content_ranges() {
        let parse = ContentRange::parse;
        assert_eq!(
            parse("bytes 0-9/10"),
            Some(ContentRange {
                range: Some((0, 9)),
                total: Some(10)
            })
        );
        assert_eq!(
            parse("Bytes 5-9/*"),
            Some(ContentRange {
                range: Some((5, 9)),
                total: None
            })
        );
        assert_eq!(
            parse("bytes */10"),
            Some(ContentRange {
                range: None,
                total: Some(10)
            })
        );
        let too_long = "bytes 0-99999999999999999999/1";
        for bad in [
            "",
            "bytes",
            "bytes 0-9",
            "items 0-9/10",
            "bytes +0-9/10",
            "bytes 0-/10",
            "bytes -9/10",
            too_long,
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn retry_after_forms() {
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        let wait = |v| retry_after(&headers(&[("retry-after", v)]), now);
        assert_eq!(wait("120"), Some(Duration::from_secs(120)));
        assert_eq!(
            wait("Sun, 06 Nov 1994 08:50:07 GMT"),
            Some(Duration::from_secs(30))
        );
        assert_eq!(
            wait("Sun, 06 Nov 1994 08:49:07 GMT"),
            Some(Duration::ZERO),
            "a date in the past"
        );
        assert_eq!(wait("soon"), None);
        assert_eq!(retry_after(&HeaderMap::new(), now), None);
    }

    #[test]
    fn versions() {
        let v = |list: &[(&'static str, &str)]| Version::of(&headers(list));
        let strong = v(&[("etag", "\"a\""), ("last-modified", "x")]);
        assert_eq!(strong.condition().unwrap().0, "if-match");
        assert_eq!(
            v(&[("etag", "W/\"a\""), ("last-modified", "x")])
                .condition()
                .unwrap()
                .0,
            "if-unmodified-since"
        );
        assert_eq!(v(&[("etag", "W/\"a\"")]).condition(), None);
        assert_eq!(v(&[]).condition(), None);
        assert!(
            strong
                .changed(&v(&[("etag", "\"b\""), ("last-modified", "x")]))
                .unwrap()
                .contains("ETag")
        );
        assert_eq!(
            strong.changed(&v(&[("etag", "W/\"a\""), ("last-modified", "y")])),
            None,
            "the tag decides"
        );
        assert!(
            strong
                .changed(&v(&[("last-modified", "y")]))
                .unwrap()
                .contains("Last-Modified")
        );
        assert_eq!(strong.changed(&v(&[])), None, "nothing to compare");
    }
}
