//! `mooncakectl`: the operator's command line.
//!
//! Guaranteed: what is printed to standard output is the answer, in the format asked for, and nothing else
//! (progress, remarks and errors go to standard error); the exit code tells success, a failed job, a refused
//! request and an unreachable cluster apart ([`error::Failure::exit_code`]); a create request always carries a
//! job id, so that repeating it at another master cannot make two jobs.
//!
//! Not guaranteed: that a job of which nothing was heard any more (exit code 3) was not created or did not go
//! on: ask for it by its id.

pub mod api;
pub mod cli;
pub mod cluster;
pub mod commands;
pub mod error;
pub mod manifest;
pub mod output;
pub mod watch;
