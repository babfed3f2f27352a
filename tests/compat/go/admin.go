package main

import (
	"context"

	"github.com/apache/rocketmq-client-go/v2/admin"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

// administer opens an admin client for one call: it keeps every route that it has ever seen.
func administer[R any](s *session, act func(admin.Admin) (R, error)) (R, error) {
	made, err := admin.NewAdmin(
		admin.WithResolver(primitive.NewPassthroughResolver(s.nameServers)),
	)
	if err != nil {
		var none R
		return none, err
	}
	defer made.Close()
	return act(made)
}

func createTopic(s *session, a struct {
	Topic, Address string
	Queues         int
}) (any, error) {
	return administer(s, func(by admin.Admin) (any, error) {
		return nil, by.CreateTopic(
			context.Background(),
			admin.WithTopicCreate(a.Topic),
			admin.WithBrokerAddrCreate(a.Address),
			admin.WithReadQueueNums(a.Queues),
			admin.WithWriteQueueNums(a.Queues),
		)
	})
}

func deleteTopic(s *session, a struct{ Topic string }) (any, error) {
	return administer(s, func(by admin.Admin) (any, error) {
		return nil, by.DeleteTopic(context.Background(), admin.WithTopicDelete(a.Topic))
	})
}

func listTopics(s *session, _ struct{}) (any, error) {
	return administer(s, func(by admin.Admin) (any, error) {
		list, err := by.FetchAllTopicList(context.Background())
		if err != nil {
			return nil, err
		}
		return list.TopicList, nil
	})
}

// listQueues answers with the queues that a producer would choose from.
func listQueues(s *session, a struct{ Topic string }) (any, error) {
	return administer(s, func(by admin.Admin) (any, error) {
		return by.FetchPublishMessageQueues(context.Background(), a.Topic)
	})
}

func listGroups(s *session, a struct{ Address string }) (any, error) {
	return administer(s, func(by admin.Admin) (any, error) {
		groups, err := by.GetAllSubscriptionGroup(context.Background(), a.Address, patience)
		if err != nil {
			return nil, err
		}
		names := make(map[string]bool, len(groups.SubscriptionGroupTable))
		for name, group := range groups.SubscriptionGroupTable {
			names[name] = group.ConsumeEnable
		}
		return names, nil
	})
}
