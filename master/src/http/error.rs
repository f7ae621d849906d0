//! From a problem to a response.

use super::ReadAt;
use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use mooncake_proto::{
    api::{PROBLEM_JSON, Problem, ProblemCode},
    manifest::{Fault, Faults},
};

/// What a caller is told to wait where waiting helps, in seconds: longer than any election.
const RETRY_AFTER_S: &str = "1";

/// Marks a response (as an extension) that another master may answer better: this one lost the leadership
/// while it served the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Elsewhere {
    /// The write may have happened.
    pub maybe_done: bool,
}

/// An error answer.
#[derive(Debug)]
pub(super) struct ApiError {
    problem: Box<Problem>,
    elsewhere: Option<Elsewhere>,
    read_at: Option<ReadAt>,
}

impl ApiError {
    pub fn new(code: ProblemCode, detail: impl Into<String>) -> Self {
        Self {
            problem: Box::new(Problem::new(code, detail)),
            elsewhere: None,
            read_at: None,
        }
    }

    pub fn parameter(detail: impl Into<String>) -> Self {
        Self::new(ProblemCode::InvalidParameter, detail)
    }

    pub fn faults(faults: Faults) -> Self {
        let errors = faults.into_vec();
        let detail = match errors.as_slice() {
            [one] => format!("{}: {}", one.pointer, one.detail),
            many => format!("{} faults, listed in `errors`", many.len()),
        };
        Self::new(ProblemCode::InvalidRequest, detail).with_errors(errors)
    }

    pub fn with_errors(mut self, errors: Vec<Fault>) -> Self {
        self.problem.errors = errors;
        self
    }

    /// The state said so at this applied index.
    pub fn at(mut self, index: u64) -> Self {
        self.read_at = Some(ReadAt(index));
        self
    }

    pub fn not_leader() -> Self {
        let detail = "this master lost the leadership before it did anything; repeat the request";
        Self {
            elsewhere: Some(Elsewhere { maybe_done: false }),
            ..Self::new(ProblemCode::NoLeader, detail)
        }
    }

    pub fn outcome_unknown(why: &str) -> Self {
        Self::outcome_unknown_with(format!(
            "{why}; ask for the job by its id, or repeat the same request: it is idempotent"
        ))
    }

    /// With the whole text, where it is not about a job.
    pub fn outcome_unknown_with(detail: String) -> Self {
        Self {
            elsewhere: Some(Elsewhere { maybe_done: true }),
            ..Self::new(ProblemCode::OutcomeUnknown, detail)
        }
    }

    pub fn with_job(mut self, job: impl Into<String>) -> Self {
        self.problem.job_id = Some(job.into());
        self
    }

    #[cfg(test)]
    pub fn problem(&self) -> &Problem {
        &self.problem
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let problem = *self.problem;
        let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        if status.is_server_error() && problem.code == ProblemCode::Internal {
            tracing::error!(code = ?problem.code, detail = %problem.detail, "answering an internal error");
        } else {
            tracing::debug!(code = ?problem.code, detail = %problem.detail, "answering a problem");
        }
        let retry = matches!(
            status,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
        );
        let mut response = (status, Json(problem)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON));
        if retry {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER_S));
        }
        if let Some(elsewhere) = self.elsewhere {
            response.extensions_mut().insert(elsewhere);
        }
        if let Some(read_at) = self.read_at {
            response.extensions_mut().insert(read_at);
        }
        response
    }
}
