//! A master that answers what a test says, on loopback.

use axum::{
    Router,
    body::Bytes,
    http::{Method, StatusCode, Uri},
    response::{IntoResponse, Response},
};
use mooncake_proto::api::{Problem, ProblemCode};
use serde::Serialize;
use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: Method,
    pub path: String,
    pub query: HashMap<String, String>,
    pub body: serde_json::Value,
    /// Counts from 0.
    pub number: usize,
}

impl Request {
    /// `GET /path`.
    pub fn line(&self) -> String {
        format!("{} {}", self.method, self.path)
    }
}

pub struct Fake {
    pub url: String,
    pub log: Arc<Mutex<Vec<Request>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Fake {
    pub async fn start(handler: impl Fn(&Request) -> Response + Clone + Send + Sync + 'static) -> Self {
        let log = Arc::<Mutex<Vec<Request>>>::default();
        let seen = log.clone();
        let app = Router::new().fallback(move |method: Method, uri: Uri, body: Bytes| {
            let mut log = seen.lock().unwrap();
            let full = url::Url::parse("http://x")
                .unwrap()
                .join(&uri.to_string())
                .unwrap();
            let request = Request {
                method,
                path: uri.path().to_owned(),
                query: full.query_pairs().into_owned().collect(),
                body: serde_json::from_slice(&body).unwrap_or_default(),
                number: log.len(),
            };
            log.push(request.clone());
            drop(log);
            let answer = handler(&request);
            async move { answer }
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, log, task }
    }

    pub fn lines(&self) -> Vec<String> {
        self.log.lock().unwrap().iter().map(Request::line).collect()
    }
}

/// A port on which nobody listens.
pub async fn nobody() -> SocketAddr {
    tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap()
}

pub fn ok(value: impl Serialize) -> Response {
    (StatusCode::OK, serde_json::to_string(&value).unwrap()).into_response()
}

pub fn problem(code: ProblemCode, detail: &str) -> Response {
    refuse(&Problem::new(code, detail))
}

pub fn refuse(problem: &Problem) -> Response {
    let status = StatusCode::from_u16(problem.status).unwrap();
    (
        status,
        [("content-type", "application/problem+json")],
        serde_json::to_string(problem).unwrap(),
    )
        .into_response()
}
