//! From web servers that misbehave in every way seen in the field.

use super::{
    server::{Piece, Reply, Server, good},
    *,
};
use std::time::Instant;

/// A server that answers request number `n` with `fault(n)`, and properly where that is `None`.
async fn faulty(
    data: &[u8],
    fault: impl Fn(usize, &server::Request) -> Option<Reply> + Send + Sync + 'static,
) -> Server {
    let data = data.to_vec();
    Server::start(move |r| fault(r.number, r).unwrap_or_else(|| good(&data, "\"v1\"", r))).await
}

/// Runs against a server whose every answer is `head` and `body`; nothing may be held afterwards.
async fn always(head: &str, body: &[u8]) -> (Server, Result<Seal, TaskFailure>) {
    let data = noise(4 * BLOCK, 1);
    let (head, body) = (head.to_owned(), body.to_vec());
    let server = Server::start(move |_| Reply::sized(&head, &body)).await;
    let node = Node::with_file(&data);
    let result = node.acquire_from(&server.url("f?X-Signature=s3cret#frag")).await;
    assert_eq!(node.held(), [0; 0]);
    if let Err(failure) = &result {
        assert!(
            !failure.message.contains("s3cret") && !failure.message.contains("frag"),
            "{failure}"
        );
        assert!(failure.message.contains(&server.url("f?…")), "{failure}");
    }
    (server, result)
}

#[tokio::test]
async fn refusals_are_final_and_asked_for_once() {
    for (status, code) in [
        ("404 Not Found", "source_not_found"),
        ("410 Gone", "source_not_found"),
        ("401 Unauthorized", "source_forbidden"),
        ("403 Forbidden", "source_forbidden"),
        ("400 Bad Request", "source_refused"),
        ("501 Not Implemented", "source_protocol"),
        ("204 No Content", "source_protocol"),
        ("304 Not Modified", "source_protocol"),
    ] {
        let (server, result) = always(status, b"").await;
        failed(result, code, false, &[status, "'f'"]);
        assert_eq!(server.requests().len(), 1, "{status}");
    }
}

#[tokio::test]
async fn an_error_page_is_never_written() {
    // Of exactly the size that was asked for.
    let page = vec![b'<'; 2 * BLOCK];
    let (server, result) = always("500 Internal Server Error", &page).await;
    failed(
        result,
        "source_unavailable",
        true,
        &["500 Internal Server Error", "5 tries", "kept"],
    );
    assert_eq!(server.requests().len(), 5);
    let (_server, result) = always("200 OK", b"<html>please log in</html>").await;
    failed(
        result,
        "size_mismatch",
        false,
        &["26 bytes", &(4 * BLOCK).to_string()],
    );
}

#[tokio::test]
async fn answers_that_do_not_fit_the_request() {
    let size = 4 * BLOCK;
    let wanted = 2 * BLOCK;
    let body = vec![7; wanted];
    for content_range in [
        format!("bytes 1-{wanted}/{size}"),
        format!("bytes 0-{}/{size}", wanted - 2),
        format!("bytes */{size}"),
        "nonsense".into(),
    ] {
        let head = format!("206 Partial Content\nContent-Range: {content_range}");
        let (_server, result) = always(&head, &body).await;
        let says = if content_range == "nonsense" {
            "without a valid Content-Range"
        } else {
            "another range"
        };
        failed(result, "source_protocol", false, &[says]);
    }
    let (_server, result) = always("206 Partial Content", &body).await;
    failed(
        result,
        "source_protocol",
        false,
        &["without a valid Content-Range"],
    );
    let head = format!(
        "206 Partial Content\nContent-Range: bytes 0-{}/{}",
        wanted - 1,
        size + 1
    );
    let (_server, result) = always(&head, &body).await;
    failed(
        result,
        "size_mismatch",
        false,
        &[&(size + 1).to_string(), &size.to_string()],
    );
    let head = format!(
        "206 Partial Content\nContent-Range: bytes 0-{}/{size}",
        wanted - 1
    );
    let (_server, result) = always(&head, &body[..100]).await;
    failed(result, "source_protocol", false, &["another range"]);
    let (_server, result) = always(&format!("{head}\nContent-Encoding: gzip"), &body).await;
    failed(result, "source_protocol", false, &["gzip"]);
    let (_server, result) = always("416 Range Not Satisfiable\nContent-Range: bytes */9", b"").await;
    failed(result, "size_mismatch", false, &["9 bytes"]);
    let (_server, result) = always("416 Range Not Satisfiable", b"").await;
    failed(result, "source_protocol", false, &["416"]);
}

#[tokio::test]
async fn temporary_faults_are_ridden_out() {
    let data = noise(6 * BLOCK, 1);
    let node = Node::with_file(&data);
    let server = faulty(&data, |n, _| match n {
        0 => Some(Reply::sized("503 Service Unavailable", b"error page")),
        1 => Some(Reply::sized(
            "429 Too Many Requests\nRetry-After: 0",
            b"slow down",
        )),
        2 => Some(Reply::new("garbage", vec![Piece::Cut])),
        _ => None,
    })
    .await;
    node.acquire_from(&server.url("f")).await.unwrap();
    assert_eq!(node.bytes(), data);
    assert_eq!(
        node.counters.load(),
        (data.len() as u64, 0),
        "error pages are not counted as payload"
    );
}

#[tokio::test]
async fn retry_after_is_honoured_and_bounded() {
    let data = noise(BLOCK, 1);
    let server = faulty(&data, |n, _| {
        (n == 0).then(|| Reply::sized("429 Too Many Requests\nRetry-After: 1", b""))
    })
    .await;
    let node = Node::with_file(&data);
    let begin = Instant::now();
    node.acquire_from(&server.url("f")).await.unwrap();
    assert!(
        begin.elapsed() >= Duration::from_secs(1),
        "asked to wait a second"
    );

    let server = faulty(&data, |_, _| {
        Some(Reply::sized("429 Too Many Requests\nRetry-After: 3600", b""))
    })
    .await;
    let node = Node::with_file(&data);
    failed(
        node.acquire_from(&server.url("f")).await,
        "source_rate_limited",
        true,
        &["3600 s"],
    );
    assert_eq!(server.requests().len(), 1);
}

/// The head of a correct answer to the first request of a file of `size` bytes.
fn first_range(size: usize) -> String {
    format!(
        "206 Partial Content\nETag: \"v1\"\nContent-Range: bytes 0-{}/{size}\nContent-Length: {}",
        2 * BLOCK - 1,
        2 * BLOCK
    )
}

#[tokio::test]
async fn a_cut_range_goes_on_at_the_block_boundary() {
    let data = noise(4 * BLOCK, 1);
    let d = data.clone();
    let server = faulty(&data, move |n, _| {
        // One block and a half, then the connection is gone.
        let part = Piece::Bytes(d[..BLOCK + BLOCK / 2].to_vec());
        (n == 0).then(|| Reply::new(&first_range(d.len()), vec![part, Piece::Cut]))
    })
    .await;
    let node = Node::with_file(&data);
    node.acquire_from(&server.url("f")).await.unwrap();
    assert_eq!(node.bytes(), data);
    assert!(
        server
            .requests()
            .iter()
            .any(|r| r.range() == Some((BLOCK, 2 * BLOCK - 1))),
        "{:?}",
        server.requests()
    );
    let (fetched, refetched) = node.counters.load();
    assert!(refetched <= BLOCK as u64 / 2, "{refetched}");
    assert_eq!(fetched - refetched, data.len() as u64);
}

#[tokio::test]
async fn a_stalled_connection_is_given_up() {
    let data = noise(4 * BLOCK, 1);
    let d = data.clone();
    let server = faulty(&data, move |n, _| {
        let part = Piece::Bytes(d[..BLOCK + 5].to_vec());
        (n == 0).then(|| Reply::new(&first_range(d.len()), vec![part, Piece::Stall]))
    })
    .await;
    let node = Node::with_file(&data);
    // Long enough that only the server that stalls is given up, not this process when it stands still.
    let waits = |no_progress_timeout| SourceConfig {
        no_progress_timeout,
        ..quick()
    };
    let (url, all) = (server.url("f"), server.url(""));
    node.acquire_in(waits(Duration::from_secs(5)), &[&url], &[&all])
        .await
        .unwrap();
    assert_eq!((node.bytes(), node.counters.load().1), (data.clone(), 5));

    let server = faulty(&data, |_, _| Some(Reply::new("200 OK", vec![Piece::Stall]))).await;
    let node = Node::with_file(&data);
    let (url, all) = (server.url("f"), server.url(""));
    let failure = node
        .acquire_in(waits(Duration::from_millis(400)), &[&url], &[&all])
        .await;
    failed(
        failure,
        "source_interrupted",
        false,
        &["no byte arrived", "does not honour ranges"],
    );
}

#[tokio::test]
async fn a_connection_that_trickles_is_given_up() {
    let data = noise(4 * BLOCK, 1);
    let d = data.clone();
    let server = faulty(&data, move |n, _| {
        let part = Piece::Bytes(d[..BLOCK + 5].to_vec());
        (n == 0).then(|| Reply::new(&first_range(d.len()), vec![part, Piece::Trickle]))
    })
    .await;
    let node = Node::with_file(&data);
    let url = server.url("f");
    let origin = url::Url::parse(&url).unwrap().origin().ascii_serialization();
    let config = SourceConfig {
        no_progress_timeout: Duration::from_secs(2),
        floor_bytes: 1024,
        ..quick()
    };
    let run = acquire(node.task(&[&url], &[&origin]), config, CancellationToken::new());
    tokio::time::timeout(Duration::from_secs(60), run)
        .await
        .expect("it does not wait for a byte at a time")
        .unwrap();
    assert_eq!(node.bytes(), data);
}

/// A source that takes every connection it can get, and sends nothing.
#[tokio::test]
async fn a_slow_source_takes_no_connection_from_others() {
    let data = noise(4 * BLOCK, 1);
    let d = data.clone();
    let slow = Server::start(move |r| {
        let (a, b) = r.range().expect("ranges are asked for");
        let (total, len) = (d.len(), b - a + 1);
        let head = format!(
            "206 Partial Content\nETag: \"v1\"\nContent-Range: bytes {a}-{b}/{total}\nContent-Length: {len}"
        );
        Reply::new(&head, vec![Piece::Stall])
    })
    .await;
    let sha = Checksum::Sha256(Digest::sha256(&data));
    let names: Vec<String> = (0..limits::FILES_AT_ONCE).map(|n| n.to_string()).collect();
    let greedy = Node::new(
        names
            .iter()
            .map(|n| manifest_file(n, data.len(), sha.clone()))
            .collect(),
    );
    let urls: Vec<String> = names.iter().map(|n| slow.url(n)).collect();
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let origin = url::Url::parse(urls[0]).unwrap().origin().ascii_serialization();
    let patient = SourceConfig {
        no_progress_timeout: Duration::from_secs(3600),
        ..quick()
    };
    let cancel = CancellationToken::new();
    let greedy_run = acquire(greedy.task(&urls, &[&origin]), patient, cancel.clone());
    let other = async {
        while slow.requests().len() < 6 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let server = Server::good(data.clone()).await;
        let node = Node::with_file(&data);
        let result = node.acquire_from(&server.url("f")).await;
        cancel.cancel();
        result
    };
    let (greedy_end, other) = tokio::join!(greedy_run, other);
    other.unwrap();
    assert!(greedy_end.unwrap_err().is_canceled());
    assert_eq!(slow.requests().len(), 6, "one of its own, and what all share");
}

#[tokio::test]
async fn endless_bodies_end() {
    let data = noise(2 * BLOCK, 1);
    for head in [
        "200 OK\nConnection: close".to_owned(),
        format!(
            "206 Partial Content\nConnection: close\nContent-Range: bytes 0-{}/{}",
            data.len() - 1,
            data.len()
        ),
    ] {
        let server = faulty(&data, move |_, _| Some(Reply::new(&head, vec![Piece::Endless]))).await;
        let node = Node::with_file(&data);
        failed(
            node.acquire_from(&server.url("f")).await,
            "size_mismatch",
            false,
            &["more bytes"],
        );
        assert_eq!(node.held(), [0; 0]);
    }
}

#[tokio::test]
async fn a_short_source_is_told_from_a_cut() {
    let data = noise(3 * BLOCK, 1);
    let d = data.clone();
    let server = Server::start(move |_| {
        let mut body = format!("{:x}\r\n", 2 * BLOCK).into_bytes();
        body.extend_from_slice(&d[..2 * BLOCK]);
        body.extend_from_slice(b"\r\n0\r\n\r\n");
        Reply::new("200 OK\nTransfer-Encoding: chunked", vec![Piece::Bytes(body)])
    })
    .await;
    let node = Node::with_file(&data);
    failed(
        node.acquire_from(&server.url("f")).await,
        "size_mismatch",
        false,
        &[&format!("only {} bytes", 2 * BLOCK)],
    );
    assert_eq!(node.held(), [0; 0]);
}

#[tokio::test]
async fn without_ranges_a_cut_begins_anew_but_not_for_ever() {
    let data = noise(6 * BLOCK, 1);
    let head = format!("200 OK\nContent-Length: {}", data.len());
    let (d, h) = (data.clone(), head.clone());
    // Each answer gets one block further than the one before.
    let server = Server::start(move |r| {
        let end = ((r.number + 1) * BLOCK + 3).min(d.len());
        Reply::new(&h, vec![Piece::Bytes(d[..end].to_vec()), Piece::Cut])
    })
    .await;
    let node = Node::with_file(&data);
    node.acquire_from(&server.url("f")).await.unwrap();
    assert_eq!((node.bytes(), server.requests().len()), (data.clone(), 6));

    // Always cut half-way.
    let d = data.clone();
    let server =
        Server::start(move |_| Reply::new(&head, vec![Piece::Bytes(d[..3 * BLOCK].to_vec()), Piece::Cut]))
            .await;
    let node = Node::with_file(&data);
    let failure = node.acquire_from(&server.url("f")).await;
    failed(
        failure,
        "source_interrupted",
        false,
        &[
            "3 times in a row",
            "does not honour ranges",
            "cut off",
            "use a server",
        ],
    );
    assert_eq!(server.requests().len(), 4);
    assert_eq!(node.held(), [0, 1, 2], "what was verified is kept");
}

#[tokio::test]
async fn a_source_that_changes_is_left() {
    let data = noise(8 * BLOCK, 1);
    // The server honours If-Match …
    let server = faulty(&data, |n, r| {
        (n > 0).then(|| {
            assert_eq!(r.header("if-match"), Some("\"v1\""));
            Reply::sized("412 Precondition Failed", b"")
        })
    })
    .await;
    let node = Node::with_file(&data);
    failed(
        node.acquire_from(&server.url("f")).await,
        "source_changed",
        true,
        &["discarded"],
    );
    assert_eq!(node.held(), [0; 0]);

    // … or ignores it, and shows another tag …
    let other = noise(8 * BLOCK, 2);
    let server = faulty(&data, move |n, r| {
        let (a, b) = r.range()?;
        let head = format!(
            "206 Partial Content\nETag: \"v2\"\nContent-Range: bytes {a}-{b}/{}",
            other.len()
        );
        (n > 0).then(|| Reply::sized(&head, &other[a..=b]))
    })
    .await;
    failed(
        node.acquire_from(&server.url("f")).await,
        "source_changed",
        true,
        &["\"v1\"", "\"v2\""],
    );
    assert_eq!(node.held(), [0; 0]);

    // … or has only a date.
    let d = data.clone();
    let server = Server::start(move |r| {
        let (a, b) = r.range().unwrap();
        let date = if r.number == 0 {
            "Sun, 06 Nov 1994 08:49:37 GMT"
        } else {
            "Mon, 07 Nov 1994 08:49:37 GMT"
        };
        if r.number > 0 {
            assert_eq!(
                r.header("if-unmodified-since"),
                Some("Sun, 06 Nov 1994 08:49:37 GMT")
            );
        }
        let head = format!(
            "206 Partial Content\nLast-Modified: {date}\nContent-Range: bytes {a}-{b}/{}",
            d.len()
        );
        Reply::sized(&head, &d[a..=b])
    })
    .await;
    failed(
        node.acquire_from(&server.url("f")).await,
        "source_changed",
        true,
        &["Last-Modified"],
    );
}

#[tokio::test]
async fn a_wrong_checksum_over_http() {
    let data = noise(4 * BLOCK, 1);
    let server = Server::good(noise(4 * BLOCK, 2)).await;
    let node = Node::with_file(&data);
    failed(
        node.acquire_from(&server.url("f?k=v")).await,
        "checksum_mismatch",
        false,
        &["f?…", "expected sha256:"],
    );
    assert_eq!((node.held(), server.served()), (vec![], data.len() as u64));
}

#[tokio::test]
async fn ranges_refused_half_way_are_retried() {
    let data = noise(8 * BLOCK, 1);
    let d = data.clone();
    let server = faulty(&data, move |n, _| {
        (n == 1).then(|| Reply::sized("200 OK\nETag: \"v1\"", &d))
    })
    .await;
    let node = Node::with_file(&data);
    node.acquire_from(&server.url("f")).await.unwrap();
    assert_eq!(
        (node.bytes(), node.counters.load()),
        (data.clone(), (data.len() as u64, 0))
    );
}

#[tokio::test]
async fn redirects_that_are_not_followed() {
    let data = noise(BLOCK, 1);
    let redirect = |to: &str| {
        let to = to.to_owned();
        Server::start(move |_| Reply::sized(&format!("302 Found\nLocation: {to}"), b""))
    };
    let node = Node::with_file(&data);
    // The test server is on loopback, from where only link-local places are forbidden; the rules by address
    // are tested with the scopes.
    for to in [
        "http://169.254.169.254/latest/meta-data",
        "http://[fe80::1]/x",
        "ftp://127.0.0.1/x",
        "file:///etc/passwd",
        "http://u:p@127.0.0.1/x",
    ] {
        let server = redirect(to).await;
        let failure = failed(
            node.acquire_from(&server.url("f")).await,
            "redirect_refused",
            false,
            &["--allow-source"],
        );
        assert!(!failure.message.contains("u:p"));
    }
    // Not even to a place that is allowed: the credentials would be sent.
    let d = data.clone();
    let server = Server::start(move |r| match r.path.as_str() {
        "/f" => {
            let to = format!("http://u:p@{}/g", r.header("host").unwrap());
            Reply::sized(&format!("302 Found\nLocation: {to}"), b"")
        }
        _ => good(&d, "\"v1\"", r),
    })
    .await;
    let result = node.acquire_from(&server.url("f")).await;
    let failure = failed(result, "redirect_refused", false, &["user name or password"]);
    assert!(!failure.message.contains("u:p"));
    assert_eq!(server.requests().len(), 1);
    let server = redirect("/f").await;
    failed(
        node.acquire_from(&server.url("f")).await,
        "too_many_redirects",
        false,
        &["10 times"],
    );
    assert_eq!(server.requests().len(), 11);
    let server = Server::start(|_| Reply::sized("302 Found", b"")).await;
    failed(
        node.acquire_from(&server.url("f")).await,
        "source_protocol",
        false,
        &["where to"],
    );
}

#[tokio::test]
async fn nobody_listens() {
    let data = noise(BLOCK, 1);
    let node = Node::with_file(&data);
    let gone = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap();
    let failure = node.acquire_from(&format!("http://{gone}/f?sig=s3cret")).await;
    let failure = failed(
        failure,
        "source_unavailable",
        true,
        &[&gone.to_string(), "refused", "5 tries"],
    );
    assert!(!failure.message.contains("s3cret"));
}

#[tokio::test]
async fn canceling_a_stalled_download_is_prompt_and_keeps_blocks() {
    let data = noise(4 * BLOCK, 1);
    let d = data.clone();
    let server = faulty(&data, move |n, _| {
        let part = Piece::Bytes(d[..BLOCK + 1].to_vec());
        (n == 0).then(|| Reply::new(&first_range(d.len()), vec![part, Piece::Stall]))
    })
    .await;
    let node = Node::with_file(&data);
    let cancel = CancellationToken::new();
    let patient = SourceConfig {
        no_progress_timeout: Duration::from_secs(3600),
        ..quick()
    };
    let mut progress = node.artifact.progress();
    let task = node.task(&[&server.url("f")], &[&server.url("")]);
    let (result, ()) = tokio::join!(acquire(task, patient, cancel.clone()), async {
        // The stalled request is the first; the others may be through.
        while !node.artifact.has(2) || !node.artifact.has(3) {
            progress.changed().await.unwrap();
        }
        cancel.cancel();
    });
    failed(result, "canceled", false, &[]);
    assert!(
        [2, 3].iter().all(|&b| node.artifact.has(b)),
        "verified blocks stay"
    );
    assert!(!node.artifact.has(1), "half a block is nothing");
}
