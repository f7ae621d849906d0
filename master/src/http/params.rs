//! Query parameters: strict, so that a misspelt filter is an error and not a different answer.

use super::error::ApiError;
use axum::{
    extract::{FromRequestParts, Path},
    http::request::Parts,
};
use mooncake_proto::{
    api::JobStatus,
    ids::{JobId, ModelRef, NodeId},
    text::cut,
};
use std::time::Duration;

/// Entries of a page where the caller does not say.
const DEFAULT_LIMIT: usize = 100;
/// Most entries of a page: bounds an answer to about a megabyte.
const MAX_LIMIT: usize = 1000;
/// Longest long poll; a longer wish is cut to it.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(60);
/// Most parameters looked at.
const MAX_PARAMETERS: usize = 32;

/// Parameters every read takes.
const COMMON: [&str; 2] = ["consistency", "min_index"];

/// A parsed query string.
#[derive(Debug, Default)]
pub(super) struct Params(Vec<(String, String)>);

/// The one variable segment of a path. What is no UTF-8 behind its percent signs is a problem document too.
pub(super) struct Segment(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Segment {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(segment)) => Ok(Self(segment)),
            Err(why) => Err(ApiError::parameter(format!(
                "the path {} cannot be read: {}",
                cut(parts.uri.path()),
                cut(&why.body_text())
            ))),
        }
    }
}

/// How fresh a read must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Consistency {
    /// Reflects every write acknowledged before the request.
    Linearizable,
    /// What this master has applied, at least up to an index.
    Stale { min_index: u64 },
}

impl Params {
    /// Splits and decodes; refuses a parameter given twice.
    pub fn parse(query: Option<&str>) -> Result<Self, ApiError> {
        let mut out: Vec<(String, String)> = Vec::new();
        // The host is only there because a URL needs one.
        let url = url::Url::parse(&format!("http://h/?{}", query.unwrap_or_default()))
            .map_err(|e| ApiError::parameter(format!("the query string cannot be read: {e}")))?;
        for (name, value) in url.query_pairs() {
            if out.iter().any(|(n, _)| *n == name) {
                return Err(ApiError::parameter(format!(
                    "the parameter '{}' is given twice",
                    cut(&name)
                )));
            }
            if out.len() == MAX_PARAMETERS {
                return Err(ApiError::parameter(format!(
                    "more than {MAX_PARAMETERS} parameters are given"
                )));
            }
            out.push((name.into_owned(), value.into_owned()));
        }
        Ok(Self(out))
    }

    /// Refuses what is in neither list.
    pub fn only(&self, known: &[&str]) -> Result<(), ApiError> {
        match self
            .0
            .iter()
            .find(|(n, _)| !known.contains(&n.as_str()) && !COMMON.contains(&n.as_str()))
        {
            None => Ok(()),
            Some((name, _)) => {
                let all = known
                    .iter()
                    .chain(&COMMON)
                    .copied()
                    .collect::<Vec<_>>()
                    .join(", ");
                Err(ApiError::parameter(format!(
                    "the parameter '{}' is not known here; known are: {all}",
                    cut(name)
                )))
            }
        }
    }

    /// Refuses all: writes have no parameters, not even those that every read takes.
    pub fn none(&self) -> Result<(), ApiError> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => Err(ApiError::parameter(format!(
                "the parameter '{}' is not known here: this request has none",
                cut(name)
            ))),
        }
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    fn number(&self, name: &str) -> Result<Option<u64>, ApiError> {
        let Some(text) = self.get(name) else {
            return Ok(None);
        };
        let number = text
            .parse()
            .map_err(|_| ApiError::parameter(format!("{name}: '{}' is not a whole number", cut(text))))?;
        Ok(Some(number))
    }

    pub fn consistency(&self) -> Result<Consistency, ApiError> {
        let min_index = self.number("min_index")?;
        match self.get("consistency") {
            // A caller that wants a lower bound and does not get it must know.
            None | Some("linearizable") if min_index.is_some() => Err(ApiError::parameter(
                "min_index: only with consistency=stale; a linearizable read is never behind",
            )),
            None | Some("linearizable") => Ok(Consistency::Linearizable),
            Some("stale") => Ok(Consistency::Stale {
                min_index: min_index.unwrap_or(0),
            }),
            Some(other) => Err(ApiError::parameter(format!(
                "consistency: '{}' is neither 'linearizable' nor 'stale'",
                cut(other)
            ))),
        }
    }

    /// `wait`: `20s`, `1500ms`, `1m`, or a number of seconds.
    pub fn wait(&self) -> Result<Option<Duration>, ApiError> {
        let Some(text) = self.get("wait") else {
            return Ok(None);
        };
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = text.split_at(digits);
        let unit_ms = match unit {
            "" | "s" => 1000,
            "ms" => 1,
            "m" => 60_000,
            _ => 0,
        };
        match number.parse::<u64>() {
            Ok(n) if unit_ms > 0 => Ok(Some(
                Duration::from_millis(n.saturating_mul(unit_ms)).min(MAX_WAIT),
            )),
            _ => Err(ApiError::parameter(format!(
                "wait: '{}' is not a duration such as 20s, 1500ms or 20",
                cut(text)
            ))),
        }
    }

    /// Whether a read with these may be held back for longer than any other request.
    pub fn is_long_poll(&self) -> bool {
        self.wait()
            .is_ok_and(|wait| wait.is_some_and(|wait| !wait.is_zero()))
    }

    pub fn since(&self) -> Result<Option<u64>, ApiError> {
        self.number("since")
    }

    pub fn limit(&self) -> Result<usize, ApiError> {
        match self.number("limit")? {
            None => Ok(DEFAULT_LIMIT),
            Some(n) if (1..=MAX_LIMIT as u64).contains(&n) => Ok(n as usize),
            Some(n) => Err(ApiError::parameter(format!(
                "limit: {n} is not in 1 to {MAX_LIMIT}"
            ))),
        }
    }

    pub fn status(&self) -> Result<Option<JobStatus>, ApiError> {
        let Some(text) = self.get("status") else {
            return Ok(None);
        };
        let status = serde_json::from_value(serde_json::Value::String(text.to_owned())).map_err(|_| {
            ApiError::parameter(format!(
                "status: '{}' is none of planned, seeding, replicating, completed, failed, canceled",
                cut(text)
            ))
        })?;
        Ok(Some(status))
    }

    pub fn node(&self) -> Result<Option<NodeId>, ApiError> {
        self.get("node")
            .map(|t| NodeId::parse(t).map_err(|e| ApiError::parameter(format!("node: {}", cut(&e)))))
            .transpose()
    }

    pub fn job_token(&self) -> Result<Option<(u64, JobId)>, ApiError> {
        let Some(token) = self.get("page_token") else {
            return Ok(None);
        };
        let parsed = token.strip_prefix("j1.").and_then(|rest| {
            let (at, id) = rest.split_once('.')?;
            Some((at.parse().ok()?, JobId::parse(id).ok()?))
        });
        parsed.map(Some).ok_or_else(bad_token)
    }

    pub fn model_token(&self) -> Result<Option<ModelRef>, ApiError> {
        let Some(token) = self.get("page_token") else {
            return Ok(None);
        };
        let parsed = token.strip_prefix("m1.").and_then(|hex| {
            let bytes: Option<Vec<u8>> = (0..hex.len())
                .step_by(2)
                .map(|i| u8::from_str_radix(hex.get(i..i + 2)?, 16).ok())
                .collect();
            serde_json::from_slice(&bytes?).ok()
        });
        parsed.map(Some).ok_or_else(bad_token)
    }
}

fn bad_token() -> ApiError {
    ApiError::parameter(
        "page_token is not one that this API gave: pass `next_page_token` of the last page unchanged",
    )
}

/// The token after this job.
pub(super) fn job_token(created_ms: u64, id: &JobId) -> String {
    format!("j1.{created_ms}.{id}")
}

/// The token after this model.
pub(super) fn model_token(model: &ModelRef) -> String {
    let json = serde_json::to_vec(model).expect("four strings encode");
    json.iter().fold("m1.".to_owned(), |mut token, byte| {
        use std::fmt::Write;
        let _ = write!(token, "{byte:02x}");
        token
    })
}

/// The query string of a long poll that is sent again: with `wait` cut to what is left of it, and with `since` if
/// the caller gave none.
pub(super) fn again(query: &str, left: Duration, since: Option<u64>) -> String {
    let mut out = url::form_urlencoded::Serializer::new(String::new());
    let mut has_since = false;
    for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
        has_since |= name == "since";
        match &*name {
            "wait" => out.append_pair(&name, &format!("{}ms", left.as_millis())),
            _ => out.append_pair(&name, &value),
        };
    }
    if let Some(since) = since.filter(|_| !has_since) {
        out.append_pair("since", &since.to_string());
    }
    out.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_proto::api::ProblemCode;

    fn params(query: &str) -> Params {
        Params::parse(Some(query)).unwrap()
    }

    #[test]
    fn waits() {
        for (text, ms) in [
            ("20s", 20_000),
            ("20", 20_000),
            ("1500ms", 1500),
            ("1m", 60_000),
            ("0", 0),
            ("99999999999999", 60_000),
        ] {
            assert_eq!(
                params(&format!("wait={text}")).wait().unwrap(),
                Some(Duration::from_millis(ms)),
                "{text}"
            );
        }
        for text in ["", "s", "-1", "1h", "1.5s", "20 s"] {
            assert!(
                params(&format!("wait={text}")).wait().is_err(),
                "{text:?} must be refused"
            );
        }
        assert_eq!(params("").wait().unwrap(), None);
    }

    #[test]
    fn consistency() {
        assert_eq!(params("").consistency().unwrap(), Consistency::Linearizable);
        assert_eq!(
            params("consistency=stale&min_index=7").consistency().unwrap(),
            Consistency::Stale { min_index: 7 }
        );
        assert!(params("consistency=eventual").consistency().is_err());
        assert!(params("consistency=stale&min_index=x").consistency().is_err());
        // Never silently ignored.
        assert!(params("min_index=7").consistency().is_err());
        assert!(
            params("consistency=linearizable&min_index=7")
                .consistency()
                .is_err()
        );
    }

    #[test]
    fn misspelt_and_repeated_parameters_are_errors() {
        let error = params("state=failed").only(&["status"]).unwrap_err();
        assert_eq!(error.problem().code, ProblemCode::InvalidParameter);
        assert!(
            error.problem().detail.contains("status"),
            "{}",
            error.problem().detail
        );
        assert!(
            params("status=failed&consistency=stale")
                .only(&["status"])
                .is_ok()
        );
        assert!(Params::parse(Some("a=1&a=2")).is_err());
        assert!(params("").none().is_ok());
        assert!(params("consistency=stale").none().is_err());
        let long = format!("{}=1", "x".repeat(50_000));
        let error = params(&long).only(&[]).unwrap_err();
        assert!(error.problem().detail.len() < 400, "{}", error.problem().detail);
    }

    #[test]
    fn tokens_round_trip() {
        let id = JobId::parse("a.b_c-1").unwrap();
        let token = job_token(12, &id);
        assert_eq!(
            params(&format!("page_token={token}")).job_token().unwrap(),
            Some((12, id))
        );
        let model = ModelRef {
            model_id: "org/ü".into(),
            revision: "r&1".into(),
            format: "f".into(),
            provider: "p".into(),
        };
        assert_eq!(
            params(&format!("page_token={}", model_token(&model)))
                .model_token()
                .unwrap(),
            Some(model)
        );
        for bad in ["", "x", "j1.", "j1.1", "j1.a.b", "m1.zz", "m1.7", "m1.é"] {
            assert!(
                params(&format!("page_token={bad}")).job_token().is_err(),
                "{bad:?}"
            );
            assert!(
                params(&format!("page_token={bad}")).model_token().is_err(),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn limits() {
        assert_eq!(params("").limit().unwrap(), 100);
        assert_eq!(params("limit=1000").limit().unwrap(), 1000);
        for bad in ["0", "1001", "-1", "x"] {
            assert!(params(&format!("limit={bad}")).limit().is_err());
        }
    }

    #[test]
    fn the_wait_of_a_repeated_poll_is_what_is_left() {
        let left = Duration::from_millis(1234);
        let query = again("since=4&w%61it=60s&x=a%26b", left, Some(7));
        assert_eq!(query, "since=4&wait=1234ms&x=a%26b");
        assert_eq!(again("wait=60s", left, Some(7)), "wait=1234ms&since=7");
        assert_eq!(again("wait=60s", left, None), "wait=1234ms");
    }
}
