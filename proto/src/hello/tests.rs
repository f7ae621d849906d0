use super::*;

fn config(cluster: &str, secret: Option<&str>) -> HelloConfig {
    HelloConfig {
        cluster_id: cluster.into(),
        secret: secret.map(|s| Secret::new(s.as_bytes()).unwrap()),
        node_id: "127.0.0.1:1".into(),
        instance_id: "disk".into(),
        software: "test".into(),
        features: 0b11,
    }
}

const SECRET: &str = "0123456789abcdef-secret";

async fn shake(
    client: HelloConfig,
    server: HelloConfig,
) -> (Result<PeerInfo, HelloError>, Result<PeerInfo, HelloError>) {
    let (mut a, mut b) = tokio::io::duplex(1 << 16);
    tokio::join!(
        async {
            let r = connect(&mut a, &client, Purpose::Session).await;
            drop(a);
            r
        },
        async {
            let r = accept(&mut b, &server, &[Purpose::Raft, Purpose::Session]).await;
            drop(b);
            r
        }
    )
}

fn code<T: fmt::Debug>(r: Result<T, HelloError>) -> String {
    match r {
        Err(HelloError::Refused { code, message }) => {
            assert!(message.len() > 20, "a refusal explains itself: {message}");
            code
        }
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[tokio::test]
async fn same_cluster_with_and_without_secret() {
    for secret in [None, Some(SECRET)] {
        let (c, s) = shake(
            config("a", secret),
            HelloConfig {
                features: 0b110,
                ..config("a", secret)
            },
        )
        .await;
        let (c, s) = (c.unwrap(), s.unwrap());
        assert_eq!(
            (c.version, c.features, s.features),
            (PROTOCOL_VERSION, 0b10, 0b10)
        );
        assert_eq!(
            (s.node_id.as_str(), s.instance_id.as_str()),
            ("127.0.0.1:1", "disk")
        );
    }
}

#[tokio::test]
async fn both_ends_learn_why() {
    let other = Some("another-secret-0123456789");
    for (client, server, want) in [
        (config("a", None), config("b", None), "wrong_cluster"),
        (config("a", None), config("a", Some(SECRET)), "secret_required"),
        (
            config("a", Some(SECRET)),
            config("a", None),
            "secret_not_configured",
        ),
    ] {
        let (c, s) = shake(client, server).await;
        assert_eq!((code(c).as_str(), code(s).as_str()), (want, want));
    }
    // The opener finds out first and hangs up.
    let (c, s) = shake(config("a", other), config("a", Some(SECRET))).await;
    assert_eq!(code(c), "wrong_secret");
    assert!(s.is_err());
}

/// An opener that skips the check of the server's proof still cannot get in.
#[tokio::test]
async fn an_opener_without_the_secret_is_refused_by_the_acceptor() {
    let (mut a, mut b) = tokio::io::duplex(1 << 16);
    let server = config("a", Some(SECRET));
    let cheat = async {
        let hello = pb::ClientHello {
            magic: MAGIC.into(),
            version_min: PROTOCOL_VERSION_MIN,
            version_max: PROTOCOL_VERSION,
            cluster_id: "a".into(),
            purpose: pb::Purpose::Session as i32,
            identity: Some(identity(&server)),
            nonce: nonce(),
            has_secret: true,
            ..Default::default()
        };
        write(&mut a, &hello).await.unwrap();
        let (_, _): (pb::ServerHello, _) = read(&mut a).await.unwrap();
        let (theirs, _): (pb::Proof, _) = read(&mut a).await.unwrap();
        // The server's own proof, reflected, must not do.
        write(&mut a, &theirs).await.unwrap();
        let (verdict, _): (pb::Verdict, _) = read(&mut a).await.unwrap();
        verdict.refusal.unwrap().code
    };
    let (said, got) = tokio::join!(cheat, accept(&mut b, &server, &[Purpose::Session]));
    assert_eq!(said, "wrong_secret");
    assert_eq!(code(got), "wrong_secret");
}

#[tokio::test]
async fn a_port_serves_only_its_purposes() {
    let (mut a, mut b) = tokio::io::duplex(1 << 16);
    let c = config("a", None);
    let (c, s) = tokio::join!(
        connect(&mut a, &c, Purpose::Data),
        accept(&mut b, &c, &[Purpose::Raft])
    );
    assert_eq!(
        (code(c).as_str(), code(s).as_str()),
        ("wrong_purpose", "wrong_purpose")
    );
}

#[tokio::test]
async fn strangers_and_newer_versions_are_told_so() {
    let (mut a, mut b) = tokio::io::duplex(1 << 16);
    a.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    assert_eq!(
        code(accept(&mut b, &config("a", None), &[Purpose::Raft]).await),
        "not_mooncake"
    );

    let newer = pb::ClientHello {
        magic: MAGIC.into(),
        version_min: PROTOCOL_VERSION + 1,
        version_max: PROTOCOL_VERSION + 2,
        ..Default::default()
    };
    assert_eq!(
        code(judge(&newer, &config("a", None), &[Purpose::Raft])),
        "version_mismatch"
    );
}

#[tokio::test(start_paused = true)]
async fn silence_ends() {
    let (_a, mut b) = tokio::io::duplex(64);
    let got = accept(&mut b, &config("a", None), &[Purpose::Raft]).await;
    assert!(matches!(got, Err(HelloError::TimedOut)), "{got:?}");
}

#[test]
fn beyond_loopback_needs_a_secret() {
    let far = "0.0.0.0:50052".parse().unwrap();
    let near = "[::1]:50052".parse().unwrap();
    let secret = Secret::new(SECRET.as_bytes()).unwrap();
    assert!(check_listen("data", &near, None).is_ok());
    assert!(check_listen("data", &far, Some(&secret)).is_ok());
    assert!(
        check_listen("data", &far, None)
            .unwrap_err()
            .contains("--cluster-secret-file")
    );
    assert!(Secret::new(b"short").is_err());
}

/// A later version's fields are covered by the proofs of both ends, also of the one that does not know them.
#[tokio::test]
async fn unknown_fields_are_proven_too() {
    let (mut a, mut b) = tokio::io::duplex(1 << 16);
    let config = config("a", Some(SECRET));
    let later = async {
        let mut hello = pb::ClientHello {
            magic: MAGIC.into(),
            version_min: PROTOCOL_VERSION_MIN,
            version_max: PROTOCOL_VERSION,
            cluster_id: "a".into(),
            purpose: pb::Purpose::Session as i32,
            nonce: nonce(),
            has_secret: true,
            ..Default::default()
        }
        .encode_to_vec();
        hello.extend([0xfa, 0x06, 1, 7]); // field 111, one byte
        let mut sent = (hello.len() as u32).to_be_bytes().to_vec();
        sent.extend(hello);
        a.write_all(&sent).await.unwrap();
        let (_, received): (pb::ServerHello, _) = read(&mut a).await.unwrap();
        let (theirs, _): (pb::Proof, _) = read(&mut a).await.unwrap();
        let transcript = [sent, received].concat();
        let secret = config.secret.as_ref().unwrap();
        verify(secret, b"server", &transcript, &theirs.proof).unwrap();
        write(&mut a, &prove(secret, b"client", &transcript))
            .await
            .unwrap();
        read::<pb::Verdict>(&mut a).await.unwrap().0.refusal
    };
    let (refusal, got) = tokio::join!(later, accept(&mut b, &config, &[Purpose::Session]));
    assert_eq!((refusal, got.is_ok()), (None, true));
}

#[tokio::test]
async fn a_long_name_is_refused_and_not_repeated() {
    let long = "x".repeat(3500);
    let (c, s) = shake(config(&long, None), config("a", None)).await;
    for end in [c, s] {
        let Err(HelloError::Refused { code, message }) = end else {
            panic!("{end:?}")
        };
        assert_eq!(code, "wrong_cluster");
        assert!(message.len() < 400, "{}", message.len());
    }
}
