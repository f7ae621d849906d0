//! One request to a source, redirects included, and what its failure means.

use super::{
    head::retry_after,
    scope::{Resolver, Scope, ScopeRefused},
};
use crate::{
    source::{AllowList, SourceConfig, context::SourceFile, limits, redact},
    task::TaskFailure,
};
use mooncake_proto::text::chain;
use parking_lot::Mutex;
use reqwest::{
    Client, Response, StatusCode,
    header::{ACCEPT_ENCODING, HeaderMap, HeaderValue, LOCATION},
};
use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};
use tokio::time::Instant;
use url::Url;

/// Idle connections are kept about as long as servers keep them.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a request did not bring what it should.
#[derive(Debug)]
pub(super) enum Trouble {
    /// Trying again does not help.
    Final(TaskFailure),
    /// Trying again may help, after at least what the server asked for.
    Transient {
        why: String,
        retry_after: Option<Duration>,
    },
}

impl Trouble {
    pub(super) fn transient(why: impl Into<String>) -> Self {
        Self::Transient {
            why: why.into(),
            retry_after: None,
        }
    }
}

impl From<TaskFailure> for Trouble {
    fn from(failure: TaskFailure) -> Self {
        Self::Final(failure)
    }
}

/// The URL of one file, and where it last led.
pub(super) struct Target {
    origin: Url,
    /// Where the redirects ended, so that a signed URL is asked for once and not for every range. Dropped
    /// when it is refused (it expires). A leaf lock.
    resolved: Mutex<Option<Url>>,
}

impl Target {
    pub(super) fn new(origin: Url) -> Self {
        Self {
            origin,
            resolved: Mutex::default(),
        }
    }
}

/// Makes the requests of one acquisition.
///
/// It sends no credentials at all: no `Authorization`, no cookies, no referrer, so that there are none that a
/// redirect could carry to another origin; and a redirect to a URL that holds some is refused. Proxies (`HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY`)
/// are honoured; where one is used it resolves names, and its own rules decide where they may lead.
pub(in crate::source) struct Fetcher {
    client: Client,
    resolver: Resolver,
    allow: AllowList,
    /// For the head of an answer.
    head_timeout: Duration,
    retry_after_max: Duration,
    /// No request before then: a server asked for it. A leaf lock.
    not_before: Mutex<Instant>,
}

impl Fetcher {
    pub(in crate::source) fn new(allow: AllowList, config: &SourceConfig) -> Result<Self, TaskFailure> {
        // An error says that one is installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let resolver = Resolver::default();
        let builder = || {
            Client::builder()
                .user_agent(concat!("mooncake_client/", env!("CARGO_PKG_VERSION")))
                .redirect(reqwest::redirect::Policy::none())
                .referer(false)
                .connect_timeout(config.connect_timeout)
                .dns_resolver(Arc::new(resolver.clone()))
                .pool_idle_timeout(POOL_IDLE_TIMEOUT)
                .pool_max_idle_per_host(limits::CONNECTIONS)
        };
        // A node without CA certificates can still acquire over plain HTTP; whoever wants TLS of it is told that no
        // certificate is trusted.
        let client = builder()
            .build()
            .or_else(|_| builder().tls_certs_only([]).build())
            .map_err(|e| {
                let message = format!(
                    "cannot set up HTTP: {}; are the proxy variables valid?",
                    chain(&e)
                );
                TaskFailure::permanent("http_setup", message)
            })?;
        Ok(Self {
            client,
            resolver,
            allow,
            head_timeout: config.connect_timeout + config.no_progress_timeout,
            retry_after_max: config.retry_after_max,
            not_before: Mutex::new(Instant::now()),
        })
    }

    /// Waits while a server has asked for a pause.
    pub(super) async fn turn(&self) {
        loop {
            let until = *self.not_before.lock();
            if until <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(until).await;
        }
    }

    /// Every request of this acquisition waits for `pause`. Too long a pause ends it.
    pub(super) fn pause(&self, file: &SourceFile, pause: Duration) -> Result<(), TaskFailure> {
        if pause > self.retry_after_max {
            let message = format!(
                "{} (the source of '{}') asks to come back in {} s: its rate limit is used up. What was verified is \
                 kept; try again later",
                file.location,
                file.path,
                pause.as_secs()
            );
            return Err(TaskFailure::retryable("source_rate_limited", message));
        }
        let mut not_before = self.not_before.lock();
        *not_before = (*not_before).max(Instant::now() + pause);
        Ok(())
    }

    /// GETs the file. Answers of status 200, 206, 412 and 416 come back; everything else is [`Trouble`].
    pub(super) async fn get(
        &self,
        file: &SourceFile,
        target: &Target,
        headers: &HeaderMap,
    ) -> Result<Response, Trouble> {
        let cached = target.resolved.lock().clone();
        if let Some(url) = cached {
            match self.follow(file, target, url, headers).await {
                // The signed URL may have expired: ask the origin for another one.
                Err(Trouble::Final(failure)) if REFUSALS.contains(&failure.code.as_str()) => {
                    *target.resolved.lock() = None;
                }
                Err(trouble) => {
                    // Whatever is wrong there, the next try begins at the origin.
                    *target.resolved.lock() = None;
                    return Err(trouble);
                }
                answer => return answer,
            }
        }
        self.follow(file, target, target.origin.clone(), headers).await
    }

    async fn follow(
        &self,
        file: &SourceFile,
        target: &Target,
        mut url: Url,
        headers: &HeaderMap,
    ) -> Result<Response, Trouble> {
        let mut origin_scope = None;
        for _ in 0..=limits::MAX_REDIRECTS {
            let request = self
                .client
                .get(url.clone())
                .headers(headers.clone())
                .header(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
            let answer = match tokio::time::timeout(self.head_timeout, request.send()).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(e)) => return Err(broken(file, e)),
                Err(_) => {
                    return Err(Trouble::transient(format!(
                        "no answer within {:?}",
                        self.head_timeout
                    )));
                }
            };
            let location = match answer.status().as_u16() {
                301 | 302 | 303 | 307 | 308 => answer.headers().get(LOCATION),
                _ => {
                    if url != target.origin {
                        *target.resolved.lock() = Some(url.clone());
                    }
                    return judge(file, answer);
                }
            };
            let next = location
                .and_then(|l| l.to_str().ok())
                .and_then(|l| url.join(l).ok());
            let Some(mut next) = next else {
                return Err(protocol(file, "redirects without saying where to").into());
            };
            next.set_fragment(None);
            tracing::debug!(file = %file.path, from = %redact(&url), to = %redact(&next), "redirected");
            // A URL with credentials is never on the list.
            if !self.allow.allows_url(&next) {
                if origin_scope.is_none() {
                    let host = target.origin.host_str().unwrap_or_default();
                    let port = target.origin.port_or_known_default().unwrap_or_default();
                    origin_scope = Some(Scope::of_host(host, port).await);
                }
                self.check_redirect(&url, &next, origin_scope.unwrap_or(Scope::Public)).map_err(|why| {
                    let message = format!(
                        "{} (the source of '{}') redirects to {}, which is refused: {why}. Allow that place with {} \
                         if it is right",
                        file.location,
                        file.path,
                        redact(&next),
                        crate::source::allow::ALLOW_FLAG
                    );
                    TaskFailure::permanent("redirect_refused", message)
                })?;
            }
            url = next;
        }
        let message = format!(
            "{} (the source of '{}') redirects more than {} times: probably in a circle",
            file.location,
            file.path,
            limits::MAX_REDIRECTS
        );
        Err(TaskFailure::permanent("too_many_redirects", message).into())
    }

    /// The rules for a redirect to a place that the allow list does not name. Signed URLs of other hosts are
    /// the norm, so that the host itself is not compared.
    fn check_redirect(&self, from: &Url, to: &Url, origin: Scope) -> Result<(), &'static str> {
        match (from.scheme(), to.scheme()) {
            (_, "https") | ("http", "http") => {}
            ("https", "http") => return Err("it leaves https"),
            _ => return Err("only http and https are followed"),
        }
        if !to.username().is_empty() || to.password().is_some() {
            return Err("it holds a user name or password");
        }
        let narrower = "it leads from outside to an address of this machine or of its network";
        match to.host() {
            Some(url::Host::Ipv4(ip)) if !origin.may_lead_to(ip.into()) => Err(narrower),
            Some(url::Host::Ipv6(ip)) if !origin.may_lead_to(ip.into()) => Err(narrower),
            Some(url::Host::Domain(name)) if !self.resolver.restrict(name, origin) => {
                Err("redirects led to too many different hosts already")
            }
            Some(_) => Ok(()),
            None => Err("it names no host"),
        }
    }
}

/// Codes with which a signed URL that has expired may be refused.
const REFUSALS: [&str; 2] = ["source_forbidden", "source_not_found"];

/// The server does not speak HTTP as it should.
pub(super) fn protocol(file: &SourceFile, what: impl std::fmt::Display) -> TaskFailure {
    let message = format!(
        "{} (the source of '{}') {what}: it cannot be read from this server or through this proxy",
        file.location, file.path
    );
    TaskFailure::permanent("source_protocol", message)
}

/// What a status means.
fn judge(file: &SourceFile, answer: Response) -> Result<Response, Trouble> {
    let status = answer.status();
    let refused = |code: &str, advice: &str| {
        let message = format!(
            "{} (the source of '{}') answered {status}: {advice}",
            file.location, file.path
        );
        Err(Trouble::Final(TaskFailure::permanent(code, message)))
    };
    match status.as_u16() {
        200 | 206 | 412 | 416 => Ok(answer),
        401 | 403 => refused(
            "source_forbidden",
            "the URL is not valid (any more), or needs credentials; make a new signed URL, or one that needs none",
        ),
        404 | 410 => refused(
            "source_not_found",
            "there is nothing at this URL; correct the download_url",
        ),
        408 | 425 | 429 | 500 | 502..=504 | 506..=599 => Err(Trouble::Transient {
            why: format!("it answered {status}"),
            retry_after: retry_after(answer.headers(), SystemTime::now()),
        }),
        _ if status.is_success() || status.is_redirection() || status == StatusCode::NOT_IMPLEMENTED => {
            Err(protocol(file, format!("answered {status} to a plain GET")).into())
        }
        _ => refused(
            "source_refused",
            "the server does not accept the request; look at its log",
        ),
    }
}

/// What a connection that failed means.
fn broken(file: &SourceFile, error: reqwest::Error) -> Trouble {
    let error = error.without_url();
    let why = chain(&error);
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(e) = cause {
        if let Some(rustls::Error::InvalidCertificate(_)) = e.downcast_ref() {
            let message = format!(
                "{} (the source of '{}') has a certificate that this machine does not trust: {why}; add its CA to the \
                 system's certificates (or SSL_CERT_FILE)",
                file.location, file.path
            );
            return Trouble::Final(TaskFailure::permanent("source_untrusted", message));
        }
        if e.is::<ScopeRefused>() {
            let message = format!(
                "a redirect of {} (the source of '{}') is refused: {why}",
                file.location, file.path
            );
            return Trouble::Final(TaskFailure::permanent("redirect_refused", message));
        }
        // `source` of an io::Error passes over the error that it was made from.
        cause = match e
            .downcast_ref::<std::io::Error>()
            .and_then(std::io::Error::get_ref)
        {
            Some(inner) => Some(inner),
            None => e.source(),
        };
    }
    Trouble::transient(why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Location;
    use mooncake_proto::manifest::Checksum;

    /// The verdict of the resolver must come through all the layers of the HTTP client.
    #[tokio::test]
    async fn a_name_with_addresses_of_this_machine_is_refused_when_a_redirect_led_to_it() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = Url::parse(&format!(
            "http://localhost:{}/f",
            listener.local_addr().unwrap().port()
        ))
        .unwrap();
        let file = SourceFile {
            path: "f".into(),
            size_bytes: 1,
            checksum: Checksum::Opaque(String::new()),
            location: Location::Url(url.clone()),
            blocks: 0..1,
            carried_over: false,
            writes: Default::default(),
        };
        let fetcher = Fetcher::new(AllowList::default(), &SourceConfig::default()).unwrap();
        let public = Url::parse("https://1.1.1.1/x").unwrap();
        assert_eq!(
            fetcher.check_redirect(&public, &url, Scope::Public),
            Err("it leaves https")
        );
        let from = Url::parse("http://1.1.1.1/x").unwrap();
        for literal in [
            "http://127.0.0.1/",
            "http://10.0.0.1/",
            "http://[::1]/",
            "http://2130706433/",
        ] {
            let to = Url::parse(literal).unwrap();
            assert!(
                fetcher.check_redirect(&from, &to, Scope::Public).is_err(),
                "{literal}"
            );
        }
        assert_eq!(
            fetcher.check_redirect(&from, &url, Scope::Public),
            Ok(()),
            "a name is judged when it is resolved"
        );
        let refused = fetcher.get(&file, &Target::new(url), &HeaderMap::new()).await;
        match refused {
            Err(Trouble::Final(failure)) => {
                assert_eq!(failure.code, "redirect_refused");
                assert!(failure.message.contains("localhost"), "{failure}");
            }
            other => panic!("must be refused for good: {other:?}"),
        }
    }
}
