//! What the port of the API bears; how it is kept to that is [`mooncake_proto::http`].

use crate::context::MasterContext;
use mooncake_proto::http::Limits;
use std::{sync::Arc, time::Duration};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

const LIMITS: Limits = Limits {
    // More than requests and long polls, since callers keep idle ones.
    connections: 20_480,
    // Idle connections stay for longer than the 60 s of common load balancers, who should be the ones to close.
    head: Duration::from_secs(75),
    // No caller that is there takes nothing of an answer for so long.
    write: Duration::from_secs(30),
};

/// Serves the API on `listener` until `cancel`; then finishes the requests in flight (long polls are
/// answered at once) and returns. The caller bounds how long it waits for that.
pub async fn serve(ctx: Arc<MasterContext>, listener: TcpListener, cancel: CancellationToken) {
    mooncake_proto::http::serve(listener, super::router(ctx), LIMITS, cancel.cancelled_owned()).await;
}
