//! What the environment decides: proxies and trusted certificates. Both are read when a process makes its
//! first connection, so that each case is a process of its own: this test binary again, with other variables.

use super::{
    server::{Server, good},
    *,
};
use std::process::Output;
use tokio_rustls::{TlsAcceptor, rustls::ServerConfig};

const CHILD: &str = "source::tests::web_environment::child";
const URL: &str = "MOONCAKE_TEST_SOURCE";

fn data() -> Vec<u8> {
    noise(5 * BLOCK, 7)
}

/// The part of the tests below that runs in a process of its own: acquires [`data`] from where the parent
/// says. Without a parent it has nothing to do.
#[tokio::test]
async fn child() {
    let Ok(url) = std::env::var(URL) else { return };
    let node = Node::with_file(&data());
    match node.acquire_from(&url).await {
        Ok(_) => assert_eq!(node.bytes(), data()),
        Err(failure) => panic!("{failure}"),
    }
}

async fn run_child(url: &str, environment: &[(&str, &str)]) -> Output {
    let mut command = tokio::process::Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", CHILD, "--nocapture"])
        .env(URL, url)
        .kill_on_drop(true);
    for name in [
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "NO_PROXY",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUEST_METHOD",
    ] {
        command.env_remove(name).env_remove(name.to_lowercase());
    }
    command.envs(environment.iter().copied()).output().await.unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[track_caller]
fn succeeded(output: &Output) {
    let text = text(output);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[tokio::test]
async fn proxies_are_honoured() {
    let proxy = Server::good(data()).await;
    // The name resolves nowhere: only the proxy can reach it.
    let output = run_child("http://model-source.invalid/f", &[("HTTP_PROXY", &proxy.url(""))]).await;
    succeeded(&output);
    let requests = proxy.requests();
    assert!(
        requests.iter().all(|r| r.path == "http://model-source.invalid/f"),
        "{requests:?}"
    );
    assert_eq!(proxy.served(), data().len() as u64);

    let direct = Server::good(data()).await;
    let environment = [("HTTP_PROXY", "http://127.0.0.1:1"), ("NO_PROXY", "127.0.0.1")];
    succeeded(&run_child(&direct.url("f"), &environment).await);
}

/// A server with a certificate for 127.0.0.1 from a CA that nobody knows, and that CA.
async fn tls_server() -> (Server, String) {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new([]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca = rcgen::CertifiedIssuer::self_signed(params, key).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &ca).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key.into())
        .unwrap();
    let data = data();
    let server = Server::start_with(Some(TlsAcceptor::from(Arc::new(config))), move |r| {
        good(&data, "\"v1\"", r)
    })
    .await;
    (server, ca.pem())
}

#[tokio::test]
async fn certificates_are_checked_against_the_system() {
    let (server, ca) = tls_server().await;
    let url = server.url("f").replace("http:", "https:");
    let node = Node::with_file(&data());
    let says = ["certificate", "SSL_CERT_FILE", "'f'"];
    failed(node.acquire_from(&url).await, "source_untrusted", false, &says);
    assert!(server.requests().is_empty() && node.held().is_empty());

    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), ca).unwrap();
    succeeded(&run_child(&url, &[("SSL_CERT_FILE", file.path().to_str().unwrap())]).await);
    assert_eq!(server.served(), data().len() as u64);
}

#[tokio::test]
async fn plain_http_needs_no_certificates() {
    let nothing = [
        ("SSL_CERT_FILE", "/nonexistent"),
        ("SSL_CERT_DIR", "/nonexistent"),
    ];
    let plain = Server::good(data()).await;
    succeeded(&run_child(&plain.url("f"), &nothing).await);

    let (server, _) = tls_server().await;
    let output = run_child(&server.url("f").replace("http:", "https:"), &nothing).await;
    let says = text(&output);
    assert!(
        !output.status.success() && says.contains("SSL_CERT_FILE"),
        "{says}"
    );
    assert!(server.requests().is_empty());
}
