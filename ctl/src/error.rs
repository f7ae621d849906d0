//! How a command fails, and with which exit code. The codes are part of the interface: never renumber.

use crate::output;
use mooncake_proto::api::Problem;

/// Why a command did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The job ended as `failed` or `canceled`. Exit code 1.
    #[error("{0}")]
    Job(String),
    /// What was asked for cannot be done as asked: files that cannot be read, options that do not fit.
    /// Exit code 2.
    #[error("{0}")]
    Usage(String),
    /// A master answered that it will not do it. Exit code 2.
    #[error("{}", problem_text(.0))]
    Refused(Box<Problem>),
    /// No master gave an answer that could be used. Exit code 3.
    #[error("{0}")]
    Unreachable(String),
    /// A signal came; what was begun is undone. Exit code 128 and the signal's number, as of a shell.
    #[error("stopped by signal {0}; nothing is left behind")]
    Interrupted(i32),
}

impl Failure {
    /// 1: the job failed or was canceled; 2: bad usage or a refused request; 3: unreachable; above 128: a signal.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Job(_) => 1,
            Self::Usage(_) | Self::Refused(_) => 2,
            Self::Unreachable(_) => 3,
            Self::Interrupted(signal) => 128 + *signal as u8,
        }
    }

    /// Tells the person.
    pub fn print(&self) {
        eprintln!("{} {self}", output::red_on_stderr("mooncakectl:"));
    }
}

fn problem_text(problem: &Problem) -> String {
    let mut text = format!("{} ({}): {}", problem.title, problem.status, problem.detail);
    for fault in &problem.errors {
        let at = if fault.pointer.is_empty() {
            "the request"
        } else {
            &fault.pointer
        };
        text.push_str(&format!("\n  {at}: {} [{}]", fault.detail, fault.code));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_proto::{api::ProblemCode, manifest::Fault};

    #[test]
    fn every_fault_of_a_refused_request_is_shown() {
        let fault = |pointer: &str| Fault {
            pointer: pointer.into(),
            code: "missing".into(),
            detail: "this member is required".into(),
        };
        let problem = Problem::new(ProblemCode::InvalidRequest, "2 faults")
            .with_errors(vec![fault("/model"), fault("")]);
        let failure = Failure::Refused(Box::new(problem));
        let text = failure.to_string();
        assert!(
            text.contains("(400)") && text.contains("/model: this") && text.contains("the request: this"),
            "{text}"
        );
        assert_eq!(failure.exit_code(), 2);
        assert_eq!(Failure::Job(String::new()).exit_code(), 1);
        assert_eq!(Failure::Unreachable(String::new()).exit_code(), 3);
        assert_eq!(Failure::Interrupted(15).exit_code(), 143);
    }
}
