//! What this project needs of etcd's gRPC service `etcdserverpb.KV`: put and range of one key, written down by hand. Fields
//! that are not asked for are left out; their numbers are etcd's.

use anyhow::{Result, ensure};
use bytes::Bytes;
use std::time::Duration;
use tonic::{
    Request,
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

const PUT: &str = "/etcdserverpb.KV/Put";
const RANGE: &str = "/etcdserverpb.KV/Range";

#[derive(Clone, PartialEq, prost::Message)]
struct PutRequest {
    #[prost(bytes = "bytes", tag = "1")]
    key: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    value: Bytes,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PutResponse {}

#[derive(Clone, PartialEq, prost::Message)]
struct RangeRequest {
    #[prost(bytes = "bytes", tag = "1")]
    key: Bytes,
    #[prost(bool, tag = "7")]
    serializable: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RangeResponse {
    #[prost(message, repeated, tag = "2")]
    kvs: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct KeyValue {
    #[prost(bytes = "bytes", tag = "5")]
    value: Bytes,
}

/// One connection to one member.
#[derive(Clone)]
pub(super) struct Kv(Channel);

impl Kv {
    /// It connects with the first request, and again whenever it has to.
    pub(super) fn new(member: &str, timeout: Duration) -> Result<Self> {
        let endpoint = Endpoint::from_shared(member.to_owned())?;
        Ok(Self(endpoint.timeout(timeout).tcp_nodelay(true).connect_lazy()))
    }

    pub(super) async fn put(&self, key: Bytes, value: Bytes) -> Result<()> {
        let PutResponse {} = self.ask(PUT, PutRequest { key, value }).await?;
        Ok(())
    }

    /// The value, from this member's own state or as a quorum has it.
    pub(super) async fn get(&self, key: Bytes, serializable: bool) -> Result<Bytes> {
        let answer: RangeResponse = self.ask(RANGE, RangeRequest { key, serializable }).await?;
        ensure!(answer.kvs.len() == 1, "{} keys instead of one", answer.kvs.len());
        Ok(answer.kvs[0].value.clone())
    }

    async fn ask<Q, A>(&self, path: &'static str, request: Q) -> Result<A>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let mut grpc = Grpc::new(self.0.clone());
        grpc.ready().await?;
        let path = PathAndQuery::from_static(path);
        let answer = grpc.unary(Request::new(request), path, ProstCodec::<Q, A>::default());
        Ok(answer.await?.into_inner())
    }
}
