//! Requests to the masters, with failover.
//!
//! Every request is repeated at the next endpoint when an endpoint cannot be reached, does not answer in
//! time, or answers that it cannot serve now (429, 5xx). All requests of this program may be repeated: reads
//! change nothing, a create carries its job id, a job is canceled once, and a change of the masters that finds its wish
//! fulfilled changes nothing.

use crate::error::Failure;
use mooncake_proto::{
    api::{Problem, ProblemCode},
    text::chain,
};
use reqwest::{Client, Method, StatusCode};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};
use url::Url;

/// Times the list of endpoints is gone through: enough to outlast an election.
const ROUNDS: u32 = 5;
/// The pause after a round; doubles.
const ROUND_PAUSE: Duration = Duration::from_millis(200);
/// The longest pause that a master may ask for.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// To a TCP connection: a dead master must not hold up the others for long.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Largest answer that is read, in bytes: far above a page of anything.
const MAX_ANSWER_BYTES: usize = 256 << 20;

/// The masters.
pub struct Api {
    endpoints: Vec<Endpoint>,
    /// Where the last answer came from.
    preferred: AtomicUsize,
    timeout: Duration,
}

struct Endpoint {
    base: Url,
    client: Client,
}

/// What one endpoint made of a request.
enum Tried<T> {
    Answer(T),
    Refused(Failure),
    /// Why, and how long to wait before it is asked again.
    Next(String, Option<Duration>),
}

impl Api {
    /// To these endpoints, in this order.
    pub fn new(endpoints: &[Url], timeout: Duration) -> Result<Self, Failure> {
        // An error says that one is installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let needs_tls = endpoints.iter().any(|e| e.scheme() == "https");
        let client = |proxies: bool| {
            let builder = || {
                let builder = Client::builder()
                    .user_agent(concat!("mooncakectl/", env!("CARGO_PKG_VERSION")))
                    .connect_timeout(CONNECT_TIMEOUT)
                    .redirect(reqwest::redirect::Policy::none());
                if proxies { builder } else { builder.no_proxy() }
            };
            // A host without CA certificates can do without them, unless it is to talk TLS.
            builder()
                .build()
                .or_else(|e| match needs_tls {
                    true => Err(e),
                    false => builder().tls_certs_only([]).build(),
                })
                .map_err(|e| {
                    Failure::Usage(format!(
                        "cannot set up HTTP: {}; are the CA certificates of the system installed (or SSL_CERT_FILE \
                         set), and the proxy variables valid?",
                        chain(&e)
                    ))
                })
        };
        let (direct, proxied) = (client(false)?, client(true)?);
        let endpoints = endpoints
            .iter()
            .map(|base| {
                // A proxy never reaches this machine's loopback.
                let client = if is_loopback(base) { &direct } else { &proxied };
                Endpoint {
                    base: base.clone(),
                    client: client.clone(),
                }
            })
            .collect();
        Ok(Self {
            endpoints,
            preferred: AtomicUsize::new(0),
            timeout,
        })
    }

    /// GETs `path` with `query`.
    pub async fn get<T: DeserializeOwned>(
        &self,
        path: &[&str],
        query: &[(&str, String)],
    ) -> Result<T, Failure> {
        self.call(Method::GET, path, query, None::<&()>, self.timeout)
            .await
    }

    /// GETs `path`, where the master may hold its answer back for `wait`.
    pub async fn poll<T: DeserializeOwned>(
        &self,
        path: &[&str],
        query: &[(&str, String)],
        wait: Duration,
    ) -> Result<T, Failure> {
        self.call(Method::GET, path, query, None::<&()>, self.timeout + wait)
            .await
    }

    /// POSTs to `path`.
    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &[&str],
        body: Option<&impl Serialize>,
    ) -> Result<T, Failure> {
        self.call(Method::POST, path, &[], body, self.timeout).await
    }

    /// GETs `path` and gives the bytes of the answer to `take` as they come. When an answer breaks off, `begin` is
    /// called again and the next endpoint is asked.
    pub async fn download<W>(
        &self,
        path: &[&str],
        query: &[(&str, String)],
        mut begin: impl FnMut() -> Result<W, Failure>,
        mut take: impl FnMut(&mut W, &[u8]) -> Result<(), Failure>,
    ) -> Result<W, Failure> {
        let mut last = Failure::Unreachable("no endpoint is given".into());
        for round in 0..ROUNDS {
            for endpoint in &self.endpoints {
                let mut into = begin()?;
                match endpoint
                    .receive(path, query, self.timeout, &mut |piece| take(&mut into, piece))
                    .await
                {
                    Tried::Answer(()) => return Ok(into),
                    Tried::Refused(failure) => return Err(failure),
                    Tried::Next(why, _) => last = Failure::Unreachable(format!("{}: {why}", endpoint.base)),
                }
            }
            if round + 1 < ROUNDS {
                tokio::time::sleep(ROUND_PAUSE * 2u32.pow(round)).await;
            }
        }
        Err(last)
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &[&str],
        query: &[(&str, String)],
        body: Option<&impl Serialize>,
        timeout: Duration,
    ) -> Result<T, Failure> {
        let body = body.map(|b| serde_json::to_vec(b).expect("plain data always encodes"));
        let mut why = vec![String::new(); self.endpoints.len()];
        let begin = Instant::now();
        for round in 0..ROUNDS {
            let first = self.preferred.load(Ordering::Relaxed);
            let mut pause = ROUND_PAUSE * 2u32.pow(round);
            for n in 0..self.endpoints.len() {
                let index = (first + n) % self.endpoints.len();
                let tried = self.endpoints[index]
                    .send(&method, path, query, body.as_deref(), timeout)
                    .await;
                match tried {
                    Tried::Answer(answer) => {
                        self.preferred.store(index, Ordering::Relaxed);
                        return Ok(answer);
                    }
                    Tried::Refused(failure) => return Err(failure),
                    Tried::Next(reason, after) => {
                        why[index] = reason;
                        pause = pause.max(after.unwrap_or_default());
                    }
                }
            }
            if begin.elapsed() >= timeout {
                break;
            }
            if round + 1 < ROUNDS {
                tokio::time::sleep(pause.min(PAUSE_MAX)).await;
            }
        }
        let list: Vec<_> = self
            .endpoints
            .iter()
            .zip(&why)
            .map(|(e, why)| format!("\n  {}: {why}", e.base))
            .collect();
        Err(Failure::Unreachable(format!(
            "no master could serve the request:{}\nAre the masters running, and are these \
             their HTTP addresses (--endpoint, MOONCAKE_ENDPOINTS)?",
            list.concat()
        )))
    }
}

impl Endpoint {
    fn url(&self, path: &[&str]) -> Url {
        let mut url = self.base.clone();
        // Endpoints have a host, so that they can have segments.
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        url
    }

    async fn send<T: DeserializeOwned>(
        &self,
        method: &Method,
        path: &[&str],
        query: &[(&str, String)],
        body: Option<&[u8]>,
        timeout: Duration,
    ) -> Tried<T> {
        let mut request = self
            .client
            .request(method.clone(), self.url(path))
            .query(query)
            .timeout(timeout);
        if let Some(body) = body {
            request = request
                .header("content-type", "application/json")
                .body(body.to_vec());
        }
        let mut answer = match request.send().await {
            Ok(answer) => answer,
            Err(e) => return Tried::Next(chain(&e.without_url()), None),
        };
        let status = answer.status();
        let after = answer
            .headers()
            .get("retry-after")
            .and_then(|v| v.to_str().ok()?.parse().ok());
        let after = after.map(Duration::from_secs);
        let mut bytes = Vec::new();
        loop {
            match answer.chunk().await {
                Ok(Some(chunk)) if bytes.len() + chunk.len() <= MAX_ANSWER_BYTES => {
                    bytes.extend_from_slice(&chunk)
                }
                Ok(Some(_)) => {
                    return Tried::Next(format!("its answer is above {MAX_ANSWER_BYTES} bytes"), None);
                }
                Ok(None) => break,
                Err(e) => {
                    return Tried::Next(format!("its answer broke off: {}", chain(&e.without_url())), None);
                }
            }
        }
        judge(status, &bytes, after)
    }
}

impl Endpoint {
    /// `patience`: for the head, and for each piece.
    async fn receive(
        &self,
        path: &[&str],
        query: &[(&str, String)],
        patience: Duration,
        take: &mut impl FnMut(&[u8]) -> Result<(), Failure>,
    ) -> Tried<()> {
        let late = || Tried::Next(format!("nothing came for {} s", patience.as_secs()), None);
        let request = self.client.get(self.url(path)).query(query).send();
        let mut answer = match tokio::time::timeout(patience, request).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(e)) => return Tried::Next(chain(&e.without_url()), None),
            Err(_) => return late(),
        };
        let status = answer.status();
        if !status.is_success() {
            let body = tokio::time::timeout(patience, answer.bytes()).await;
            let body = body.ok().and_then(Result::ok).unwrap_or_default();
            return match judge::<serde_json::Value>(status, &body, None) {
                Tried::Refused(failure) => Tried::Refused(failure),
                Tried::Next(why, after) => Tried::Next(why, after),
                Tried::Answer(_) => late(),
            };
        }
        loop {
            match tokio::time::timeout(patience, answer.chunk()).await {
                Ok(Ok(Some(piece))) => {
                    if let Err(failure) = take(&piece) {
                        return Tried::Refused(failure);
                    }
                }
                Ok(Ok(None)) => return Tried::Answer(()),
                Ok(Err(e)) => {
                    return Tried::Next(format!("its answer broke off: {}", chain(&e.without_url())), None);
                }
                Err(_) => return late(),
            }
        }
    }
}

fn judge<T: DeserializeOwned>(status: StatusCode, body: &[u8], after: Option<Duration>) -> Tried<T> {
    if status.is_success() {
        return match serde_json::from_slice(body) {
            Ok(answer) => Tried::Answer(answer),
            Err(e) => Tried::Next(
                format!("answered {status}, but not as this API does ({e}): is it a master?"),
                None,
            ),
        };
    }
    let problem: Option<Problem> = serde_json::from_slice(body).ok();
    let code = problem.as_ref().map(|p| p.code);
    let elsewhere = status.is_server_error()
        || status == StatusCode::TOO_MANY_REQUESTS
        || status == StatusCode::REQUEST_TIMEOUT;
    match problem {
        // What the outcome was is settled by repeating it.
        _ if elsewhere || code == Some(ProblemCode::OutcomeUnknown) => {
            let detail = problem.map_or_else(String::new, |p| format!(": {}", p.detail));
            Tried::Next(format!("answered {status}{detail}"), after)
        }
        Some(problem) => Tried::Refused(Failure::Refused(Box::new(problem))),
        None => match detail_of(body) {
            // A newer master may have codes that this program does not know.
            Some(detail) => Tried::Refused(Failure::Usage(format!("the master answered {status}: {detail}"))),
            None => Tried::Next(
                format!("answered {status}, but not as this API does: is it a master?"),
                None,
            ),
        },
    }
}

/// The explanation in a problem document, whatever else is in it.
fn detail_of(body: &[u8]) -> Option<String> {
    let value: serde_json::Value = serde_json::from_slice(body).ok()?;
    Some(value.get("detail")?.as_str()?.to_owned())
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        Some(url::Host::Domain(name)) => name == "localhost",
        None => false,
    }
}
