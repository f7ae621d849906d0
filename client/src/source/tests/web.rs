//! From web servers that do as they should.

use super::{
    server::{Piece, Reply, Server, good},
    *,
};
use std::{collections::BTreeMap, sync::atomic::AtomicBool, sync::atomic::Ordering};
use tokio::sync::Notify;

#[tokio::test]
async fn ranges_fetch_every_byte_once() {
    let data = noise(13 * BLOCK + 5, 1);
    let server = Server::good(data.clone()).await;
    let node = Node::with_file(&data);
    node.acquire_from(&server.url("f")).await.unwrap();
    assert_eq!(node.bytes(), data);
    assert_eq!(server.served(), data.len() as u64);
    assert_eq!(node.counters.load(), (data.len() as u64, 0));
    let requests = server.requests();
    assert_eq!(requests.len(), 7, "one request per two blocks, none besides");
    let mut ranges: Vec<_> = requests.iter().map(|r| r.range().unwrap()).collect();
    ranges.sort_unstable();
    assert_eq!((ranges[0].0, ranges[6].1), (0, data.len() - 1));
    assert!(ranges.windows(2).all(|w| w[0].1 + 1 == w[1].0), "{ranges:?}");
    for request in &requests {
        assert_eq!(request.header("accept-encoding"), Some("identity"));
        assert_eq!(
            request.header("if-match"),
            (request.number > 0).then_some("\"v1\"")
        );
        assert!(request.header("authorization").is_none() && request.header("referer").is_none());
    }
}

#[tokio::test]
async fn only_missing_blocks_are_asked_for() {
    let data = noise(10 * BLOCK, 1);
    let server = Server::good(data.clone()).await;
    let node = Node::with_file(&data);
    for block in [0, 1, 2, 5, 9] {
        node.write(block, &data[block as usize * BLOCK..][..BLOCK]);
    }
    node.acquire_from(&server.url("f")).await.unwrap();
    assert_eq!(node.bytes(), data);
    assert_eq!(server.served(), 5 * BLOCK as u64);
    let mut ranges: Vec<_> = server.requests().iter().map(|r| r.range().unwrap()).collect();
    ranges.sort_unstable();
    let blocks: Vec<_> = ranges.iter().map(|(a, b)| (a / BLOCK, (b + 1) / BLOCK)).collect();
    assert_eq!(blocks, [(3, 5), (6, 8), (8, 9)]);
    assert_eq!(node.counters.load().1, 0);
}

#[tokio::test]
async fn many_files_and_empty_ones() {
    let files: BTreeMap<String, Vec<u8>> = (0..30)
        .map(|i| (format!("dir/f {i}"), noise(i * 17_000, i as u64 + 1)))
        .collect();
    let by_path: BTreeMap<String, Vec<u8>> = files
        .iter()
        .map(|(name, data)| (format!("/m/{}", name.replace(' ', "%20")), data.clone()))
        .collect();
    let server = Server::start(move |r| good(&by_path[&r.path], "\"v\"", r)).await;
    let sha = |d: &[u8]| Checksum::Sha256(Digest::sha256(d));
    let node = Node::new(
        files
            .iter()
            .map(|(name, data)| manifest_file(name, data.len(), sha(data)))
            .collect(),
    );
    let urls: Vec<String> = files
        .keys()
        .map(|name| server.url(&format!("m/{name}")))
        .collect();
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    node.acquire(&urls, &[&server.url("m")]).await.unwrap();
    assert_eq!(
        node.bytes(),
        files.values().flatten().copied().collect::<Vec<_>>()
    );
    assert_eq!(server.requests().len(), 29, "an empty file needs no request");
    assert_eq!(server.served(), node.artifact.blocks().total_bytes());
}

#[tokio::test]
async fn a_server_without_ranges_sends_one_stream() {
    let data = noise(9 * BLOCK + 1, 1);
    let d = data.clone();
    let server = Server::start(move |_| Reply::sized("200 OK", &d)).await;
    let node = Node::with_file(&data);
    node.acquire_from(&server.url("f")).await.unwrap();
    assert_eq!((node.bytes(), server.requests().len()), (data.clone(), 1));
    assert_eq!(node.counters.load(), (data.len() as u64, 0));

    // With a part held already, the stream is passed over up to the gap, and left after it.
    let node = Node::with_file(&data);
    for block in [0, 1, 2, 4, 5, 6, 7, 8, 9] {
        node.write(
            block,
            &data[block as usize * BLOCK..(block as usize * BLOCK + BLOCK).min(data.len())],
        );
    }
    node.acquire_from(&server.url("f")).await.unwrap();
    assert_eq!(node.bytes(), data);
    assert_eq!(
        node.counters.load().1,
        3 * BLOCK as u64,
        "bytes fetched once more are counted"
    );
}

#[tokio::test]
async fn chunked_encoding_without_a_length() {
    let data = noise(2 * BLOCK + 9, 1);
    let d = data.clone();
    let server = Server::start(move |_| {
        let mut body = format!("{:x}\r\n", d.len()).into_bytes();
        body.extend_from_slice(&d);
        body.extend_from_slice(b"\r\n0\r\n\r\n");
        Reply::new("200 OK\nTransfer-Encoding: chunked", vec![Piece::Bytes(body)])
    })
    .await;
    let node = Node::with_file(&data);
    node.acquire_from(&server.url("f")).await.unwrap();
    assert_eq!(node.bytes(), data);
}

#[tokio::test]
async fn an_unknown_total_falls_back_to_one_stream() {
    let data = noise(5 * BLOCK, 1);
    let d = data.clone();
    let server = Server::start(move |r| match r.range() {
        Some((a, b)) => Reply::sized(
            &format!("206 Partial Content\nContent-Range: bytes {a}-{b}/*"),
            &d[a..=b],
        ),
        None => Reply::sized("200 OK", &d),
    })
    .await;
    let node = Node::with_file(&data);
    node.acquire_from(&server.url("f")).await.unwrap();
    assert_eq!(node.bytes(), data);
}

#[tokio::test]
async fn blocks_are_there_before_the_file_is() {
    let data = noise(4 * BLOCK, 1);
    let release = Arc::new(Notify::new());
    let (d, wait) = (data.clone(), release.clone());
    let server = Server::start(move |_| {
        let (head, tail) = d.split_at(2 * BLOCK);
        let pieces = vec![
            Piece::Bytes(head.to_vec()),
            Piece::Wait(wait.clone()),
            Piece::Bytes(tail.to_vec()),
        ];
        Reply::new(&format!("200 OK\nContent-Length: {}", d.len()), pieces)
    })
    .await;
    let node = Node::with_file(&data);
    let mut progress = node.artifact.progress();
    let patient = SourceConfig {
        no_progress_timeout: Duration::from_secs(30),
        ..quick()
    };
    let task = node.task(&[&server.url("f")], &[&server.url("")]);
    let (result, ()) = tokio::join!(acquire(task, patient, CancellationToken::new()), async {
        while !node.artifact.has(0) {
            progress.changed().await.unwrap();
        }
        assert!(node.artifact.seal_if_whole().is_none());
        release.notify_one();
    });
    result.unwrap();
    assert_eq!(node.bytes(), data);
}

#[tokio::test]
async fn redirects_are_followed_and_remembered() {
    let data = noise(8 * BLOCK, 1);
    let storage = Server::good(data.clone()).await;
    let to = storage.url("blob?sig=s3cret");
    let front =
        Server::start(move |_| Reply::sized(&format!("302 Found\nLocation: {to}"), b"go there")).await;
    let node = Node::with_file(&data);
    node.acquire_from(&front.url("f")).await.unwrap();
    assert_eq!(node.bytes(), data);
    assert_eq!(storage.served(), data.len() as u64);
    assert_eq!(storage.requests()[0].path, "/blob?sig=s3cret");
    // Until the first answer is there, nobody else asks: a signed URL is made once.
    assert_eq!(front.requests().len(), 1);
}

#[tokio::test]
async fn an_expired_signed_url_is_asked_for_again() {
    let data = noise(8 * BLOCK, 1);
    let (d, expired) = (data.clone(), AtomicBool::new(false));
    let storage = Server::start(move |r| {
        // The first URL works twice.
        if r.path.ends_with("=0") && r.number >= 2 {
            expired.store(true, Ordering::SeqCst);
            return Reply::sized("403 Forbidden", b"<Error>expired</Error>");
        }
        good(&d, "\"v\"", r)
    })
    .await;
    let to = storage.url("blob?sig");
    let front = Server::start(move |r| {
        Reply::sized(
            &format!("307 Temporary Redirect\nLocation: {to}={}", r.number),
            b"",
        )
    })
    .await;
    let node = Node::with_file(&data);
    node.acquire_from(&front.url("f")).await.unwrap();
    assert_eq!(node.bytes(), data);
    assert!(
        storage
            .requests()
            .iter()
            .filter(|r| r.path.ends_with("=0"))
            .count()
            >= 3
    );
    assert!(front.requests().len() >= 2);
}
