//! The pages of a registry that requires tokens: what they show to a browser with a token, and that
//! they show it to no other browser.

use super::*;

/// A failure as a page, without what is different in every answer.
async fn failure(status: StatusCode, answer: Response) -> String {
    let id = answer.headers()["x-request-id"].to_str().expect("text").to_owned();
    page_with(status, answer).await.replace(&id, "ID")
}

#[tokio::test]
async fn a_browser_signs_in_with_a_token_as_the_password() {
    let registry = Registry::start_with(|config| config.require_tokens = true).await;
    let (reader, revoked, garbage) =
        (registry.token(&["*:pull"]).await, registry.token(&["*:pull"]).await, AccessToken::new([0; 8], [0; 32]));
    registry.tokens().revoke(&revoked.id()).await.expect("revoked");
    // One answer for all pages of a domain, whether or not there is anything, and for all reasons.
    for (base, paths) in [
        ("", &["/", "/ui/-/repositories", "/ui/-/storage", PAGE, "/ui/team%2Fagent/step-1", "/ui/Team"][..]),
        ("/domains/nowhere", &["/", "/ui/-/tasks", PAGE]),
    ] {
        let mut texts = BTreeSet::new();
        for path in paths {
            for token in [None, Some(&garbage), Some(&revoked)] {
                let answer = browse_as(&registry, token, &format!("{base}{path}")).await;
                let challenges: Vec<_> = answer.headers().get_all("www-authenticate").iter().cloned().collect();
                assert!(challenges.contains(&"Basic realm=\"pf-registry\", charset=\"UTF-8\"".parse().expect("a value")), "{challenges:?}");
                texts.insert(failure(StatusCode::UNAUTHORIZED, answer).await);
            }
        }
        assert_eq!(texts.len(), 1, "{texts:?}");
        for text in texts {
            assert!(text.contains("<h1>Sign in</h1>") && text.contains("an access token as the password"), "{text}");
            assert!(!text.contains("<nav") && !text.contains("/metrics"), "it leads nowhere: {text}");
            // What the page itself needs is open.
            for link in links(&text).into_iter().filter(|link| link.starts_with("/ui/-/")) {
                assert_eq!(browse(&registry, &link).await.status(), StatusCode::OK, "{link}");
            }
        }
    }
    let form = signed(registry.request(Method::POST, "/ui/team%2Fagent/step-1/verify"), None);
    failure(StatusCode::UNAUTHORIZED, form.send().await.expect("an answer")).await;
    let answer = browse(&registry, "/v1/repositories").await;
    assert_eq!(problem(answer).await.code, ErrorCode::Unauthorized, "the API answers everyone alike");
    assert_eq!(problem(registry.get("/").await).await.code, ErrorCode::Unauthorized, "and so do pages that no browser asks for");

    // The command that the page gives works as it is, but for the password, which curl asks for.
    let text = page_with(StatusCode::UNAUTHORIZED, browse(&registry, "/").await).await;
    let command = text.split_once("<code class=\"command\">").and_then(|(_, rest)| rest.split_once("</code>")).expect("a command").0;
    let operator = registry.token(&["*:admin"]).await;
    let command = command.replace("&quot;", "\"").replace("-u operator", &format!("-u operator:{}", operator.expose()));
    let shell = tokio::process::Command::new("sh").args(["-c", &command]).env("no_proxy", "*").output();
    let made = shell.await.expect("a shell");
    let made: api::AccessTokenCreated = serde_json::from_slice(&made.stdout).unwrap_or_else(|e| panic!("{e}: {command}: {made:?}"));
    let made = AccessToken::parse(&made.token).expect("a token");
    page_with(StatusCode::OK, browse_as(&registry, Some(&made), "/").await).await;

    let text = page_with(StatusCode::OK, browse_as(&registry, Some(&reader), "/").await).await;
    assert!(text.contains("signed in with the token <strong>test</strong>") && !text.contains(reader.expose()), "{text}");
}

/// A browser sends a token that it keeps with whatever another site makes it send.
#[tokio::test]
async fn another_site_cannot_use_the_token_that_a_browser_keeps() {
    let data = tempfile::tempdir().expect("a directory");
    let registry = Registry::start_again(data.path(), |_| ()).await;
    registry.push(REPO, &snapshot(0..20, vec![]), Some("step-1")).await;
    registry.stopped().await;
    let registry = Registry::start_again(data.path(), |config| config.require_tokens = true).await;
    let operator = registry.token(&["*:pull,push,delete,admin"]).await;
    // As forms and `fetch` without a preflight send them.
    let submit = async |path: &str, name: &'static str, value: String| {
        let request = signed(registry.request(Method::POST, path), Some(&operator)).header("content-type", "text/plain");
        request.header(name, value).body("{}").send().await.expect("an answer")
    };
    let verify = format!("{PAGE}/step-1/verify");
    let elsewhere = ["https://elsewhere.example", "null"].map(|origin| ("origin", origin.to_owned()));
    let sites = ["cross-site", "same-site"].map(|site| ("sec-fetch-site", site.to_owned()));
    for (name, value) in sites.into_iter().chain(elsewhere) {
        let text = failure(StatusCode::FORBIDDEN, submit(&verify, name, value.clone()).await).await;
        assert!(text.contains("a page of another site"), "{text}");
        for path in ["/v1/gc", "/v1/scrub", "/v1/tasks/collection/pause", "/v1/repositories/team%2Fagent/pushes", "/v1/tokens"] {
            let problem = problem(submit(path, name, value.clone()).await).await;
            assert!(problem.code == ErrorCode::Denied && problem.detail.contains("another site"), "{path}: {}", problem.detail);
        }
    }
    let list: api::GcRuns = ok(browse_as(&registry, Some(&operator), "/v1/gc").await).await;
    assert!(list.runs.is_empty(), "{list:?}");
    for (name, value) in [("origin", registry.url("")), ("sec-fetch-site", "same-origin".to_owned())] {
        let text = page_with(StatusCode::OK, submit(&verify, name, value).await).await;
        assert!(text.contains("Every blob is what its name says."), "{text}");
    }
}

#[tokio::test]
async fn a_token_opens_the_pages_of_its_repositories_and_no_page_tells_of_others() {
    let data = tempfile::tempdir().expect("a directory");
    let registry = Registry::start_again(data.path(), |_| ()).await;
    let base = snapshot(0..40, vec![]);
    let (fork, hidden) = (snapshot(0..44, vec![base.manifest]), snapshot(0..48, vec![base.manifest]));
    for domain in ["acme", "other"] {
        let _: api::DomainInfo = ok(registry.put(&format!("/v1/domains/{domain}"), &json!({})).await).await;
    }
    registry.push(REPO, &base, Some("step-1")).await;
    registry.push(REPO, &fork, Some("step-2")).await;
    // The same snapshot, another child of it, and a push that has not ended.
    registry.push("undisclosed%2Fvault", &base, Some("tag-x1")).await;
    registry.push("undisclosed%2Fvault", &hidden, Some("tag-x2")).await;
    registry.open_push("undisclosed%2Fdraft").await;
    registry.stopped().await;

    let registry = Registry::start_again(data.path(), |config| config.require_tokens = true).await;
    let reader = registry.token(&["team/*:pull"]).await;
    let tells = |text: &str| {
        let words = ["undisclosed", "vault", "draft", "tag-x"].map(str::to_owned).into_iter();
        words.chain([hidden.manifest.to_string(), hidden.manifest.short()]).find(|word| text.contains(word))
    };
    let pages = crawl(&registry, Some(&reader), &["/", "/ui/-/repositories?limit=1"]).await;
    for (path, text) in &pages {
        // The description of the API is the same for all callers.
        if !["/docs", "/openapi.json"].contains(&path.as_str()) {
            assert_eq!(tells(text), None, "{path}: {text}");
            assert!(!text.contains("acme") && !text.contains("under way"), "{path}: {text}");
        }
    }
    for wanted in
        ["/ui/-/repositories".to_owned(), PAGE.to_owned(), format!("{PAGE}/{}", base.manifest), format!("{PAGE}/{}", fork.manifest)]
    {
        assert!(pages.contains_key(&wanted), "{wanted}: {:?}", pages.keys());
    }
    for closed in ["/ui/-/storage", "/ui/-/engines", "/ui/-/tasks", "/metrics"] {
        assert!(!pages.contains_key(closed), "{closed} is offered");
    }
    let form = signed(registry.request(Method::POST, &format!("{PAGE}/step-1/verify")), Some(&reader));
    let verified = page_with(StatusCode::OK, form.send().await.expect("an answer")).await;
    assert_eq!(tells(&verified), None, "{verified}");
    for path in ["/ui/-/storage", "/ui/-/engines", "/ui/-/tasks"] {
        let text = failure(StatusCode::FORBIDDEN, browse_as(&registry, Some(&reader), path).await).await;
        assert!(text.contains("Another token may see more") && !text.contains("href=\"/ui/-/tasks\""), "{text}");
    }
    // What is hidden looks like what does not exist.
    let (absent, failed) = (Digest::sha256(b"absent"), async |path: String| {
        failure(StatusCode::NOT_FOUND, browse_as(&registry, Some(&reader), &path).await).await
    });
    for rest in ["", "/tag-x2", "/tag-x1"] {
        let (hidden, missing) =
            (failed(format!("/ui/undisclosed%2Fvault{rest}")).await, failed(format!("/ui/undisclosed%2Fabsent{rest}")).await);
        assert_eq!(hidden.replace("vault", "absent"), missing);
    }
    let (there, nowhere) = (failed(format!("{PAGE}/{}", hidden.manifest)).await, failed(format!("{PAGE}/{absent}")).await);
    assert_eq!(there.replace(&hidden.manifest.to_string(), &absent.to_string()), nowhere);
    let nothing = registry.token(&["nothing/*:pull"]).await;
    let text = page_with(StatusCode::OK, browse_as(&registry, Some(&nothing), "/").await).await;
    assert!(text.contains("no repository that your token may pull") && !text.contains("team"), "{text}");

    // An operator sees the domain's storage, and still only those repositories.
    let operator = registry.token(&["*:admin", "team/*:pull"]).await;
    let pages = crawl(&registry, Some(&operator), &["/"]).await;
    for (path, text) in pages.iter().filter(|(path, _)| *path != "/openapi.json") {
        assert_eq!(tells(text), None, "{path}: {text}");
    }
    let overview = &pages["/"];
    for words in ["id=\"storage\"", "may not pull are not listed", "href=\"/domains/acme/\"", "href=\"/metrics\""] {
        assert!(overview.contains(words), "{words}: {overview}");
    }
    assert!(pages.contains_key("/ui/-/storage") && pages.contains_key("/ui/-/tasks"), "{:?}", pages.keys());
    let all = registry.token(&["*:pull,admin"]).await;
    let overview = page_with(StatusCode::OK, browse_as(&registry, Some(&all), "/").await).await;
    assert!(overview.contains("undisclosed/draft") && overview.contains("undisclosed/vault"), "{overview}");
}

#[tokio::test]
async fn a_token_for_one_domain_opens_its_pages_and_those_of_no_other() {
    let registry = Registry::start_with(|config| config.require_tokens = true).await;
    let operator = registry.token(&["*:pull,push,delete,admin"]).await;
    for domain in ["acme", "other"] {
        let request = registry.request(Method::PUT, &format!("/v1/domains/{domain}")).json(&json!({}));
        let _: api::DomainInfo = ok(registry.send_as(&operator, request).await).await;
    }
    let scopes = vec!["*:pull,push,delete,admin".parse().expect("a scope")];
    let new = NewAccessToken { label: HOSTILE.into(), domain: Some("acme".parse().expect("a name")), scopes, expires_at: None };
    let token = registry.tokens().create(new).await.expect("a token").0;
    let pages = crawl(&registry, Some(&token), &["/domains/acme/"]).await;
    for wanted in ["/domains/acme/ui/-/storage", "/domains/acme/ui/-/tasks"] {
        assert!(pages.contains_key(wanted), "{wanted}: {:?}", pages.keys());
    }
    let overview = &pages["/domains/acme/"];
    assert!(overview.contains("signed in with the token <strong>&lt;script&gt;") && !overview.contains("/metrics"), "{overview}");
    // Files that are open to all callers do not tell whether a domain exists either.
    for file in ["style.css", "icon.svg"] {
        for domain in ["acme", "other", "nowhere"] {
            let answer = browse(&registry, &format!("/domains/{domain}/ui/-/{file}")).await;
            assert_eq!(answer.status(), StatusCode::OK, "{file} of {domain}");
        }
    }
    // An existing domain looks like a missing one. The page links to those that the token opens.
    let failed = async |path: &str| failure(StatusCode::NOT_FOUND, browse_as(&registry, Some(&token), path).await).await;
    for rest in ["/", "/ui/-/storage", "/ui/team%2Fagent"] {
        let (hidden, missing) = (failed(&format!("/domains/other{rest}")).await, failed(&format!("/domains/nowhere{rest}")).await);
        assert_eq!(hidden.replace("domain other ", "domain nowhere "), missing);
        assert!(missing.contains("href=\"/domains/acme/ui/-/storage\""), "{missing}");
    }
    assert!(failed("/").await.contains("href=\"/domains/acme/\""));
}
