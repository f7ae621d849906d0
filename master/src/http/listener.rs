//! The accept loop: HTTP/1.1, bounded connections, no connection that never says anything.

use crate::context::MasterContext;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use std::{pin::pin, sync::Arc, time::Duration};
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Connections at once: more than requests and long polls, since callers keep idle ones.
const MAX_CONNECTIONS: usize = 16_384;
/// Longest time for a request's head; also how long an idle connection is kept.
const HEADER_TIMEOUT: Duration = Duration::from_secs(75);
/// Longest head.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// After a failed accept (out of file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves the API on `listener` until `cancel`; then finishes the requests in flight (long polls are
/// answered at once) and returns. The caller bounds how long it waits for that.
pub async fn serve(ctx: Arc<MasterContext>, listener: TcpListener, cancel: CancellationToken) {
    let router = super::router(ctx);
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let tasks = TaskTracker::new();
    loop {
        let permit = tokio::select! {
            permit = connections.clone().acquire_owned() => permit.expect("never closed"),
            () = cancel.cancelled() => break,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = cancel.cancelled() => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept an HTTP connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let cancel = cancel.clone();
        tasks.spawn(async move {
            let _permit = permit;
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .max_buf_size(MAX_HEAD_BYTES)
                .serve_connection(TokioIo::new(stream), service);
            let mut connection = pin!(connection);
            let served = tokio::select! {
                served = connection.as_mut() => served,
                () = cancel.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = served {
                // Callers that go away are no event.
                tracing::debug!(%error, "an HTTP connection ended");
            }
        });
    }
    tasks.close();
    tasks.wait().await;
}
