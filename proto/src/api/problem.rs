//! RFC 9457 problem documents.

use crate::manifest::Fault;
use serde::{Deserialize, Serialize};

/// Every error that the HTTP API answers. The code in JSON is stable; the status belongs to the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProblemCode {
    /// The body is not JSON, or not of the request's shape (then `errors` has the place).
    InvalidJson,
    /// The body was read; its content has faults, listed in `errors`.
    InvalidRequest,
    /// A query parameter or path segment is wrong.
    InvalidParameter,
    /// No such path.
    NotFound,
    /// No such job.
    JobNotFound,
    /// No such object.
    ObjectNotFound,
    /// No such node.
    NodeNotFound,
    /// No such model.
    ModelNotFound,
    /// The path exists, the method does not.
    MethodNotAllowed,
    /// The content type is not JSON.
    UnsupportedMediaType,
    /// The body is over its limit.
    BodyTooLarge,
    /// The body came too slowly, or stopped coming: nothing was done.
    BodyTimeout,
    /// The job id exists with another body.
    JobConflict,
    /// The model version is sealed with other content, or a live job wants other content.
    ArtifactConflict,
    /// The job has ended: it cannot be canceled.
    JobTerminal,
    /// No such master in this cluster.
    MemberNotFound,
    /// The master cannot be a member as asked: another disk under its id, data of its own, a wrong address.
    MemberConflict,
    /// The master does not answer, so nothing is known about it.
    MemberUnreachable,
    /// The master is too far behind the log to vote, or to lead.
    MemberBehind,
    /// The change would leave too few living voters: writes would stop.
    QuorumAtRisk,
    /// Another change of the membership is under way: one at a time.
    ChangeInProgress,
    /// Too much at once: try again after `Retry-After`.
    Overloaded,
    /// No leader yet: nothing was done; try again after `Retry-After`.
    NoLeader,
    /// This master does not lead; another one does. Answered by `/leaderz` only.
    NotLeader,
    /// This master is behind: nothing was done; another one answers, or this one later.
    NotCaughtUp,
    /// The master is stopping: nothing was done; another one answers.
    Draining,
    /// The write may or may not have happened: ask for the job by its id, or repeat the request.
    OutcomeUnknown,
    /// A fault of this program.
    Internal,
}

impl ProblemCode {
    /// The HTTP status that goes with it.
    pub const fn status(self) -> u16 {
        match self {
            Self::InvalidJson | Self::InvalidRequest | Self::InvalidParameter => 400,
            Self::NotFound
            | Self::JobNotFound
            | Self::ObjectNotFound
            | Self::NodeNotFound
            | Self::ModelNotFound
            | Self::MemberNotFound => 404,
            Self::MethodNotAllowed => 405,
            Self::JobConflict
            | Self::ArtifactConflict
            | Self::JobTerminal
            | Self::MemberConflict
            | Self::MemberUnreachable
            | Self::MemberBehind
            | Self::QuorumAtRisk
            | Self::ChangeInProgress => 409,
            Self::BodyTimeout => 408,
            Self::BodyTooLarge => 413,
            Self::UnsupportedMediaType => 415,
            Self::Overloaded => 429,
            Self::Internal => 500,
            Self::NoLeader | Self::NotLeader | Self::NotCaughtUp | Self::Draining => 503,
            Self::OutcomeUnknown => 504,
        }
    }

    /// The human title of the code.
    pub const fn title(self) -> &'static str {
        match self {
            Self::InvalidJson => "The body is not valid JSON for this request",
            Self::InvalidRequest => "The request has faults",
            Self::InvalidParameter => "A parameter is wrong",
            Self::NotFound => "There is nothing at this path",
            Self::JobNotFound => "There is no such job",
            Self::ObjectNotFound => "There is no such object",
            Self::NodeNotFound => "There is no such node",
            Self::ModelNotFound => "There is no such model",
            Self::MethodNotAllowed => "This method is not allowed here",
            Self::UnsupportedMediaType => "The content type must be application/json",
            Self::BodyTooLarge => "The body is too large",
            Self::BodyTimeout => "The body came too slowly",
            Self::JobConflict => "The job id is taken by another request",
            Self::ArtifactConflict => "The model version has other content",
            Self::JobTerminal => "The job has already ended",
            Self::MemberNotFound => "There is no such master in this cluster",
            Self::MemberConflict => "The master cannot be a member like this",
            Self::MemberUnreachable => "The master does not answer",
            Self::MemberBehind => "The master is too far behind",
            Self::QuorumAtRisk => "Too few voters would be left alive",
            Self::ChangeInProgress => "Another membership change is under way",
            Self::Overloaded => "The cluster is overloaded",
            Self::NoLeader => "The cluster has no leader at the moment",
            Self::NotLeader => "This master does not lead",
            Self::NotCaughtUp => "This master has not caught up",
            Self::Draining => "This master is stopping",
            Self::OutcomeUnknown => "It is not known whether the write happened",
            Self::Internal => "Internal error",
        }
    }
}

/// The body of every error answer (`application/problem+json`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// `urn:mooncake:problem:<code>`.
    #[serde(rename = "type")]
    pub kind: String,
    /// For a person, fixed per code.
    pub title: String,
    /// The HTTP status, again.
    pub status: u16,
    /// Stable, for programs.
    pub code: ProblemCode,
    /// For a person: what failed, where, why, what to do next.
    pub detail: String,
    /// Every fault of the request, with its JSON pointer; the one place of the wrong type with `invalid_json`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<Fault>,
    /// The job the request was about, where one is known (always with `outcome_unknown` creates).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<String>,
}

impl Problem {
    /// A problem of `code` with a detail for a person.
    pub fn new(code: ProblemCode, detail: impl Into<String>) -> Self {
        let name = serde_json::to_value(code).expect("a unit variant encodes");
        Self {
            kind: format!("urn:mooncake:problem:{}", name.as_str().unwrap_or_default()),
            title: code.title().to_owned(),
            status: code.status(),
            code,
            detail: detail.into(),
            errors: Vec::new(),
            job_id: None,
        }
    }

    /// With the faults of a request.
    pub fn with_errors(mut self, errors: Vec<Fault>) -> Self {
        self.errors = errors;
        self
    }

    /// With the job it is about.
    pub fn with_job(mut self, job_id: impl Into<String>) -> Self {
        self.job_id = Some(job_id.into());
        self
    }
}
