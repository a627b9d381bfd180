//! A server that crashes during a commit, and gives the transaction's id to another one.

use super::{LEASE, connect, unique};
use crate::common::repository;
use pfr_store::PushId;
use pfr_testkit::postgres::{Cluster, Durability};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};

/// A proxy to the server that holds back one COMMIT and then breaks the connection.
struct Way {
    url: String,
    armed: Arc<AtomicBool>,
    held: watch::Receiver<bool>,
    cut: Arc<Notify>,
}

impl Way {
    async fn to(url: &str) -> Self {
        let server = url.split(['@', '/']).find(|part| part.contains("127.0.0.1:")).unwrap().to_owned();
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let through = url.replace(&server, &listener.local_addr().unwrap().to_string());
        let (armed, cut, (say, held)) = (Arc::new(AtomicBool::new(false)), Arc::new(Notify::new()), watch::channel(false));
        let way = Self { url: through, armed: Arc::clone(&armed), held, cut: Arc::clone(&cut) };
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (server, armed, cut, say) = (server.clone(), Arc::clone(&armed), Arc::clone(&cut), say.clone());
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(server).await else { return };
                    let ((mut asks, mut hears), (mut answers, mut is_told)) = (client.split(), server.split());
                    tokio::select! {
                        _ = tokio::io::copy(&mut answers, &mut hears) => return,
                        held = until_commit(&mut asks, &mut is_told, &armed) => if !held { return },
                    }
                    say.send_replace(true);
                    cut.notified().await;
                });
            }
        });
        way
    }
}

/// Passes on what the client says; true when it said COMMIT, which is not passed on.
async fn until_commit(
    asks: &mut (impl tokio::io::AsyncRead + Unpin),
    is_told: &mut (impl tokio::io::AsyncWrite + Unpin),
    armed: &AtomicBool,
) -> bool {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let Ok(len @ 1..) = asks.read(&mut buffer).await else { return false };
        let said = &buffer[..len];
        if said.windows(7).any(|word| word == b"COMMIT\0") && armed.swap(false, Ordering::SeqCst) {
            return true;
        }
        if is_told.write_all(said).await.is_err() {
            return false;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_a_crashed_server_gives_out_again_is_not_taken_for_a_commit() {
    let mut cluster = Cluster::start_with(Durability::Fast);
    let url = cluster.create_database();
    let mut way = Way::to(&url).await;
    let store = connect(&way.url).await;
    store.open_push(PushId(unique("push")), repository(), LEASE).await.unwrap();
    // Otherwise the log of the transaction could be written before its commit, and the server would
    // know its id after the crash.
    let writer = cluster.sql(&url, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'");
    assert!(Command::new("kill").args(["-STOP", &writer]).status().unwrap().success());
    way.armed.store(true, Ordering::SeqCst);
    let push = PushId(unique("push"));
    let opening = tokio::spawn({
        let (store, push) = (Arc::clone(&store), push.clone());
        async move { store.open_push(push, repository(), LEASE).await }
    });
    way.held.wait_for(|held| *held).await.unwrap();
    let find = "SELECT backend_xid FROM pg_stat_activity WHERE datname = current_database() AND backend_xid IS NOT NULL";
    let id: u64 = cluster.sql(&url, find).parse().unwrap();
    cluster.kill9();
    cluster.start_again();
    // Others come, and commit: one of them under the same id.
    while cluster.sql(&url, "SELECT pg_current_xact_id()").parse::<u64>().unwrap() < id {}
    let status = cluster.sql(&url, &format!("SELECT pg_xact_status('{id}')"));
    assert_eq!(status, "committed", "transaction {id} was not given out again: this tests nothing");
    way.cut.notify_one();
    opening.await.unwrap().unwrap();
    store.renew_push(push, LEASE).await.expect("a session that was said to be open");
}
