//! Access tokens: stored without their secret, valid until they expire or are revoked, and gone
//! with their domain.

use crate::common::rig::{Backend, Rig};
use crate::common::{push, repository, snapshot};
use pfr_schema::{AccessToken, AccessTokenId, DomainName, ErrorCode, RepositoryName};
use pfr_store::{AccessTokenRow, AccessTokens, NewAccessToken, Options};
use std::time::Duration;

fn new(label: &str) -> NewAccessToken {
    NewAccessToken { label: label.into(), domain: None, scopes: vec!["team/*:pull,push".parse().unwrap()], expires_at: None }
}

async fn stored(tokens: &AccessTokens, token: &AccessToken) -> AccessTokenRow {
    tokens.find(token).await.unwrap().expect("it is stored")
}

async fn a_token_is_found_by_its_secret_until_it_is_forgotten(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let domains = rig.domains(2).await;
    let (tokens, clock) = (domains.access_tokens(), domains.default_store().options().clock.clone());
    let (first, row) = tokens.create(new("first")).await.unwrap();
    assert_eq!(stored(&tokens, &first).await, row);
    assert!(row.is_valid(clock.now()));
    rig.seconds(1);
    let in_an_hour = clock.now() + 3_600_000;
    let scopes = vec!["*:admin".parse().unwrap(), "a:pull".parse().unwrap()];
    let (second, _) =
        tokens.create(NewAccessToken { expires_at: Some(in_an_hour), scopes: scopes.clone(), ..new(" second ") }).await.unwrap();
    let row = stored(&tokens, &second).await;
    assert_eq!((row.label.as_str(), &row.scopes, row.expires_at), ("second", &scopes, Some(in_an_hour)));
    assert!(row.is_valid(in_an_hour - 1) && !row.is_valid(in_an_hour));

    // The right id with another secret is no token, and the error of an unknown one says its id.
    let mut id = [0; 8];
    for (byte, at) in id.iter_mut().zip((0..16).step_by(2)) {
        *byte = u8::from_str_radix(&first.id().as_str()[at..at + 2], 16).unwrap();
    }
    assert_eq!(tokens.find(&AccessToken::new(id, [0; 32])).await.unwrap(), None);
    let nobody: AccessTokenId = "0123456789abcdef".parse().unwrap();
    let refused = tokens.revoke(&nobody).await.unwrap_err();
    assert!(refused.code() == ErrorCode::TokenUnknown && refused.to_string().contains(nobody.as_str()), "{refused}");

    let revoked = tokens.revoke(&first.id()).await.unwrap();
    rig.seconds(5);
    assert_eq!(tokens.revoke(&first.id()).await.unwrap(), revoked, "once more changes nothing");
    assert!(!stored(&tokens, &first).await.is_valid(clock.now()));

    // Listed in the order in which they were made, page by page, without a secret.
    let page = tokens.list(None, 1).await.unwrap();
    assert_eq!(page.rows, [revoked]);
    let rest = tokens.list(page.next, 1).await.unwrap();
    assert_eq!((rest.rows.len(), &rest.rows[0].id, rest.next), (1, &second.id(), None));
    assert!(!format!("{rest:?}", rest = rest.rows).contains(&second.expose()[21..85]));

    // What has been invalid for 90 days is forgotten when the next one is made.
    rig.wait(Duration::from_secs(89 * 86_400));
    tokens.create(new("third")).await.unwrap();
    assert_eq!(tokens.list(None, 10).await.unwrap().rows.len(), 3);
    rig.wait(Duration::from_secs(2 * 86_400));
    tokens.create(new("fourth")).await.unwrap();
    let labels: Vec<String> = tokens.list(None, 10).await.unwrap().rows.into_iter().map(|row| row.label).collect();
    assert_eq!(labels, ["third", "fourth"]);
}

async fn the_last_use_is_noted_at_most_once_a_minute(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let domains = rig.domains(2).await;
    let tokens = domains.access_tokens();
    let (token, row) = tokens.create(new("used")).await.unwrap();
    assert_eq!(row.used_at, None);
    tokens.note_use(&row).await.unwrap();
    let first = stored(&tokens, &token).await.used_at.expect("noted");
    let written = domains.default_store().metadata().rows_written();
    for _ in 0..5 {
        rig.seconds(10);
        // Another process may have noted it: the row that this one knows is old.
        tokens.note_use(&row).await.unwrap();
        tokens.note_use(&stored(&tokens, &token).await).await.unwrap();
    }
    assert_eq!(domains.default_store().metadata().rows_written(), written);
    rig.seconds(11);
    tokens.note_use(&stored(&tokens, &token).await).await.unwrap();
    assert_eq!(stored(&tokens, &token).await.used_at, Some(first + 61_000));
}

async fn a_token_that_cannot_be_is_refused(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let domains = rig.domains(2).await;
    let (tokens, now) = (domains.access_tokens(), domains.default_store().options().clock.now());
    let scope = || "*:pull".parse().unwrap();
    for wrong in [
        NewAccessToken { label: " ".into(), ..new("x") },
        NewAccessToken { label: "a".repeat(101), ..new("x") },
        NewAccessToken { label: "two\nlines".into(), ..new("x") },
        NewAccessToken { scopes: vec![], ..new("x") },
        NewAccessToken { scopes: (0..33).map(|_| scope()).collect(), ..new("x") },
        NewAccessToken { expires_at: Some(now), ..new("x") },
        NewAccessToken { expires_at: Some(u64::MAX), ..new("x") },
    ] {
        assert_eq!(tokens.create(wrong.clone()).await.unwrap_err().code(), ErrorCode::InvalidRequest, "{wrong:?}");
    }
    let of = |name: &str| NewAccessToken { domain: Some(name.parse().unwrap()), ..new("x") };
    assert_eq!(tokens.create(of("nowhere")).await.unwrap_err().code(), ErrorCode::DomainUnknown);
    assert!(tokens.create(of(DomainName::DEFAULT)).await.is_ok());
}

/// Neither packs nor journal have tokens.
async fn a_rebuilt_database_has_no_tokens(backend: Backend) {
    let rig = Rig::new(backend).await;
    push(&rig.store, &snapshot(&[1], vec![]), "t").await.unwrap();
    let (token, _) = rig.domains(2).await.access_tokens().create(new("lost")).await.unwrap();
    let lost = rig.beside().await;
    lost.store.rebuild(&mut |_| ()).await.unwrap();
    assert!(lost.store.tag(&repository(), &"t".parse().unwrap()).await.is_ok());
    let tokens = lost.domains(2).await.access_tokens();
    assert_eq!((tokens.find(&token).await.unwrap(), tokens.list(None, 10).await.unwrap().rows), (None, vec![]));
}

async fn tokens_of_a_deleted_domain_do_not_open_the_next_one_of_its_name(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let domains = rig.domains(2).await;
    let (tokens, acme): (_, DomainName) = (domains.access_tokens(), "acme".parse().unwrap());
    domains.create(&acme).await.unwrap();
    let of_acme = NewAccessToken { domain: Some(acme.clone()), ..new("tenant") };
    let (token, _) = tokens.create(of_acme.clone()).await.unwrap();
    let (other, _) = tokens.create(new("operator")).await.unwrap();
    domains.delete(&acme, false).await.unwrap();
    let now = domains.default_store().options().clock.now();
    assert!(!stored(&tokens, &token).await.is_valid(now) && stored(&tokens, &other).await.is_valid(now));
    assert_eq!(tokens.create(of_acme).await.unwrap_err().code(), ErrorCode::DomainUnknown);
}

async fn the_repositories_of_a_snapshot_are_all_those_that_have_it(backend: Backend) {
    let rig = Rig::new(backend).await;
    let s = snapshot(&[1, 2], vec![]);
    push(&rig.store, &s, "t").await.unwrap();
    let other: RepositoryName = "other/one".parse().unwrap();
    let session = rig.store.open_push(&other).await.unwrap();
    rig.store.missing(&session.id, vec![(s.manifest.digest, pfr_schema::Kind::Manifest)]).await.unwrap();
    rig.store.commit_in(&other, &session.id, s.manifest.digest, None, None).await.unwrap();
    let page = pfr_schema::Digest::sha256(&s.pages[0]);
    let mut places = rig.store.metadata().snapshot_places(vec![page, s.manifest.digest]).await.unwrap();
    places.sort();
    let mut expected = vec![(s.manifest.digest, other), (s.manifest.digest, repository())];
    expected.sort();
    assert_eq!(places, expected, "a page is no snapshot");
}

on_every_backend!(
    a_token_is_found_by_its_secret_until_it_is_forgotten,
    the_last_use_is_noted_at_most_once_a_minute,
    a_token_that_cannot_be_is_refused,
    a_rebuilt_database_has_no_tokens,
    tokens_of_a_deleted_domain_do_not_open_the_next_one_of_its_name,
    the_repositories_of_a_snapshot_are_all_those_that_have_it,
);
